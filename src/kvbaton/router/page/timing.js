// The bar under an answer: where the time until its first token went.
import { element } from "./dom.js";
import { bytes, milliseconds } from "./units.js";

const positive = (value) => (Number.isFinite(value) && value > 0 ? value : 0);

// first_token_s counts from the request's arrival at the instance that answers; what the other parts explain is taken off it.
// A hand-off that began before prefill was done lies behind it: only what came after it is shown as its own.
function parts(record, seenS) {
  const [queue, prefill, whole] = [positive(record.queue_s), positive(record.prefill_s), positive(record.handoff_s)];
  const explained = record.handed_off ? whole : queue + prefill;
  const first = positive(record.first_token_s - explained);
  const isStreamed = queue + prefill + whole > seenS;
  const handoff = isStreamed ? Math.max(positive(record.handover_s), whole - queue - prefill) : whole;
  return [
    ["queue", "queue", queue],
    ["prefill", "prefill", prefill],
    ["handoff", "hand-off", handoff],
    ["first", "first token", first],
    ["rest", "router and network", positive(seenS - queue - prefill - handoff - first)],
  ];
}

function remarks(record) {
  const said = [];
  if (record.handed_off) said.push(`${bytes(positive(record.bytes_moved))} moved${record.transport ? ` over ${record.transport}` : ""}`);
  if (record.recomputed) said.push("prompt computed again at the decode instance");
  if (positive(record.cached_tokens)) said.push(`${record.cached_tokens} tokens were cached`);
  return said;
}

export function timing(record, seenS) {
  const segments = parts(record ?? {}, seenS).filter(([, , seconds]) => seconds > 0);
  const track = element("div", "track", ...segments.map(([name, , seconds]) => {
    const piece = element("span", name);
    piece.style.flexGrow = seconds * 1000;
    return piece;
  }));
  track.setAttribute("aria-hidden", "true");
  const legend = element("ul", "legend", ...segments.map(([name, label, seconds]) =>
    element("li", name, element("span", "", `${label} ${milliseconds(seconds)}`))));
  const summary = [`first token after ${milliseconds(seenS)}, seen from here`, ...remarks(record ?? {})].join(" · ");
  return element("div", "timing", record ? track : null, record ? legend : null, element("div", "note", summary));
}
