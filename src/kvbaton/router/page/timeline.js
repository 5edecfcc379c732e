// The timeline of one hand-off, under its answer: asks the router for the report when it is opened, and draws it.
import { element, shape } from "./dom.js";
import { bytes, milliseconds } from "./units.js";

const WIDTH = 720;
const LABELS = 132;
const TIMES = 66;
const ROW = 20;
const TALL = 60;
const HEAD = 18;
const MOST_PARTS = 4000;
const MOST_HANDOFFS = 4;

const isTall = (bar) => (bar.parts ?? []).length > 0;
const height = (bar) => (isTall(bar) ? TALL : ROW);
const label = (bar) => (bar.phase === "queue" ? `queue, ${bar.side ?? "target"}` : bar.phase);
const range = (first, end) => (end - first > 1 ? `${first} to ${end - 1}` : `${first}`);

// Chunks, or spans.
const pieces = (bar) => (bar.parts ?? []).slice(0, MOST_PARTS);

function scale(start, end) {
  const room = WIDTH - LABELS - TIMES;
  const length = Math.max(end - start, 1e-6);
  return (seconds) => LABELS + room * Math.min(1, Math.max(0, (seconds - start) / length));
}

const wholeScale = ({ bars }) => scale(Math.min(...bars.map((bar) => bar.start_s)), Math.max(...bars.map((bar) => bar.end_s)));

function rectangle(kind, x, from, to, y, tall, words) {
  const node = shape("rect", { class: kind, x: x(from), y, width: Math.max(2, x(to) - x(from)), height: tall, rx: tall > 6 ? 2 : 0 });
  node.append(shape("title", {}, words));
  return node;
}

// A stretch of the target's, or of the wire, changes its colour where the first token was chosen.
function stretches(bar, piece, tokenS) {
  if (bar.side === "source") return [[bar.phase === "queue" ? "queue" : "prefill", piece.start_s, piece.end_s]];
  if (tokenS === null || piece.end_s <= tokenS) return [["hidden-time", piece.start_s, piece.end_s]];
  if (piece.start_s >= tokenS) return [["exposed", piece.start_s, piece.end_s]];
  return [["hidden-time", piece.start_s, tokenS], ["exposed", tokenS, piece.end_s]];
}

const pieceWords = (bar, piece) => [
  `${bar.phase}: ${milliseconds(piece.end_s - piece.start_s)}`,
  piece.end_token ? `tokens ${range(piece.first_token ?? 0, piece.end_token)}` : null,
  piece.end_layer ? `layer ${range(piece.first_layer ?? 0, piece.end_layer)}` : null,
  piece.moved_bytes ? bytes(piece.moved_bytes) : null,
].filter(Boolean).join(" · ");

// Pieces lie at the height of their layer, so that a chunk looks like stairs.
function drawPieces(bar, x, y, tokenS) {
  const layers = Math.max(1, ...pieces(bar).map((piece) => piece.end_layer ?? 0));
  const step = (TALL - 6) / layers;
  return pieces(bar).flatMap((piece) => {
    const first = piece.first_layer ?? 0;
    const tall = Math.max(1, step * Math.max(1, (piece.end_layer ?? 1) - first) - (step > 3 ? 0.6 : 0));
    return stretches(bar, piece, tokenS).map(([kind, from, to]) =>
      rectangle(kind, x, from, to, y + 3 + step * first, tall, pieceWords(bar, piece)));
  });
}

function drawRow(bar, x, y, tokenS) {
  const middle = y + height(bar) / 2;
  const time = `${milliseconds(bar.end_s - bar.start_s)}${bar.is_cut ? " ✕" : ""}`;
  const drawn = isTall(bar) ? drawPieces(bar, x, y, tokenS) : stretches(bar, bar, tokenS).map(([kind, from, to]) =>
    rectangle(kind, x, from, to, y + 4, ROW - 8, pieceWords(bar, bar)));
  return [
    shape("text", { x: 0, y: middle, class: "name" }, label(bar)),
    ...drawn,
    shape("text", { x: WIDTH, y: middle, class: bar.exposed_s ? "time strong" : "time" }, time),
  ];
}

function drawToken(x, tokenS, bottom) {
  const at = x(tokenS);
  const isLate = at > WIDTH - 160;
  return [
    shape("line", { class: "token", x1: at, x2: at, y1: 12, y2: bottom }),
    shape("text", { class: `token-name${isLate ? " before" : ""}`, x: isLate ? at - 4 : at + 4, y: 9 }, "first token"),
  ];
}

// What was waited for after the first token, one after the other, on a scale of its own.
function drawWaits(handoff, top) {
  const x = scale(0, handoff.exposed_s);
  const nodes = [shape("text", { x: 0, y: top + HEAD / 2, class: "strong" }, `after the first token: ${milliseconds(handoff.exposed_s)}`)];
  let [y, from] = [top + HEAD, 0];
  for (const wait of handoff.waits) {
    nodes.push(...drawRow({ ...wait, start_s: from, end_s: from + wait.seconds, exposed_s: wait.seconds }, x, y, 0));
    from += wait.seconds;
    y += ROW;
  }
  return [nodes, y];
}

function picture(handoff) {
  const x = wholeScale(handoff);
  const nodes = [];
  let y = HEAD;
  for (const bar of handoff.bars) {
    nodes.push(...drawRow(bar, x, y, handoff.first_token_s));
    y += height(bar);
  }
  if (handoff.first_token_s !== null) nodes.push(...drawToken(x, handoff.first_token_s, y));
  if (handoff.waits.length) {
    const [rows, bottom] = drawWaits(handoff, y + 8);
    nodes.push(...rows);
    y = bottom;
  }
  const node = shape("svg", { viewBox: `0 0 ${WIDTH} ${y + 4}`, role: "img", "aria-label": handoff.sentence });
  node.append(...nodes);
  return node;
}

const LEGEND = [["queue", "queue"], ["prefill", "prefill"], ["hidden-time", "hidden behind prefill"], ["exposed", "exposed: the client waits"]];

function shown(report) {
  const parts = report.handoffs.slice(0, MOST_HANDOFFS).flatMap((handoff) => [
    report.handoffs.length > 1 ? element("div", "", `prompt ${handoff.prompt_index}, sample ${handoff.sample_index}`) : null,
    handoff.bars.length ? picture(handoff) : null,
    element("p", "", handoff.sentence),
  ]);
  const legend = element("ul", "legend", ...LEGEND.map(([kind, words]) => element("li", kind, element("span", "", words))));
  const command = element("p", "", "In a terminal: ", element("code", "", `kvbaton explain ${report.transfer_id}`));
  return [legend, ...parts, command];
}

async function load(transfer, place) {
  place.replaceChildren(element("p", "", "Asking both instances…"));
  try {
    const answer = await fetch(`/handoffs/${encodeURIComponent(transfer)}`, { cache: "no-store", signal: AbortSignal.timeout(15000) });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error?.message ?? `The router answered ${answer.status}.`);
    place.replaceChildren(...shown(body).filter(Boolean));
  } catch (error) {
    place.replaceChildren(element("p", "", `No timeline: ${error.message}`));
  }
}

// A disclosure that asks for the report each time it is opened; a newer one closes the older ones.
export function timeline(transfer, conversation) {
  const place = element("div", "story");
  const node = element("details", "timeline", element("summary", "", "Timeline of the hand-off"), place);
  node.addEventListener("toggle", () => { if (node.open) load(transfer, place); });
  conversation.querySelectorAll("details.timeline[open]").forEach((older) => { older.open = false; });
  node.open = true;
  return node;
}
