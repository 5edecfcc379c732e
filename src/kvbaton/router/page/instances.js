// The strip of instances at the top; asks the router every two seconds.
import { element } from "./dom.js";

const EVERY_MS = 2000;
const LATE_S = 3;
const WORDS = { P: "prefill", D: "decode" };
const MODES = { READ: "pull", WRITE: "push" };

const missing = (word) =>
  element("span", "instance missing", element("span", "", element("b", "", `No ${word} instance`), ` · start one: kvbaton serve --role ${word}`));

function live(instance) {
  const node = element("span", `instance${instance.age_s > LATE_S ? " late" : ""}`,
    element("b", "", WORDS[instance.type] ?? instance.type), element("code", "", instance.http_address));
  node.title = `${instance.model || "model unknown"} · ${MODES[instance.transfer_mode]} · ${instance.zmq_address} · last heard of ${instance.age_s.toFixed(1)} s ago`;
  return node;
}

const refused = (instance) =>
  element("span", "instance refused", element("span", "", element("b", "", `${instance.http_address} refused`), ` · ${instance.reason}`));

function show(place, state) {
  const absent = Object.keys(WORDS).filter((type) => !state.live.some((instance) => instance.type === type));
  const order = [...state.live].sort((a, b) => b.type.localeCompare(a.type));
  const nodes = [...order.map(live), ...absent.map((type) => missing(WORDS[type])), ...state.refused.map(refused)];
  const key = nodes.map((node) => node.className + node.textContent).join("\n");
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    place.replaceChildren(...nodes);
  }
}

export function watchInstances(place, onModel) {
  async function look() {
    try {
      const answer = await fetch("/instances", { cache: "no-store", signal: AbortSignal.timeout(EVERY_MS * 2) });
      const state = await answer.json();
      show(place, state);
      onModel(state.live.map((instance) => instance.model).find(Boolean) ?? "");
    } catch {
      place.dataset.key = "";
      place.replaceChildren(element("span", "instance missing", "The router does not answer. Is it still running?"));
    }
    setTimeout(look, EVERY_MS);
  }
  look();
}
