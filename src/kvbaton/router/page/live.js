// The live page: asks the router every half second, and shows what has changed since.
import { element } from "./dom.js";
import { bytes } from "./units.js";

const EVERY_MS = 500;
const POINTS = 120;
const MOST_EVENTS = 50;
const WORDS = { P: "prefill", D: "decode" };
const at = (id) => document.getElementById(id);
const sum = (numbers) => Object.values(numbers ?? {}).reduce((a, b) => a + b, 0);
const keyOf = (instance) => `${instance.type} ${instance.http_address} ${instance.incarnation}`;
const nameOf = (instance) => `${WORDS[instance.type] ?? instance.type} ${instance.http_address}`;

let before = null;
const rates = [];

function note(text, classes = "") {
  const time = element("time", "", new Date().toLocaleTimeString());
  at("events").prepend(element("li", classes, time, text));
  while (at("events").childElementCount > MOST_EVENTS) at("events").lastChild.remove();
}

function rateOf(instance, state) {
  const earlier = before?.instances.get(keyOf(instance));
  const seconds = state.at_s - (before?.at_s ?? state.at_s);
  if (!earlier || seconds <= 0 || instance.moved_bytes === undefined || earlier.moved_bytes === undefined) return 0;
  return Math.max(0, instance.moved_bytes - earlier.moved_bytes) / seconds;
}

function row(instance, rate) {
  const cells = [WORDS[instance.type] ?? instance.type, instance.http_address, instance.in_flight];
  if (instance.problem) {
    const reason = element("td", "reason", instance.problem);
    reason.colSpan = 4;
    return element("tr", "instance-row", ...cells.map((cell) => element("td", "", String(cell))), reason);
  }
  cells.push(sum(instance.handoffs), `${bytes(Math.round(rate))}/s`, bytes(instance.moved_bytes), sum(instance.failures));
  return element("tr", "instance-row", ...cells.map((cell) => element("td", "", String(cell))));
}

function noteChanges(state) {
  const now = new Map(state.instances.map((instance) => [keyOf(instance), instance]));
  if (before) {
    for (const [key, instance] of now) {
      const earlier = before.instances.get(key);
      if (!earlier) note(`${nameOf(instance)} has joined`);
      for (const [cause, count] of Object.entries(instance.failures ?? {})) {
        const more = count - (earlier?.failures?.[cause] ?? 0);
        if (earlier?.failures && more > 0) note(`${nameOf(instance)}: ${more} failed: ${cause}`, "failure");
      }
    }
    for (const [key, instance] of before.instances) if (!now.has(key)) note(`${nameOf(instance)} has left`, "failure");
  }
  return now;
}

function show(state) {
  const each = state.instances.map((instance) => [instance, rateOf(instance, state)]);
  const total = each.reduce((all, [, rate]) => all + rate, 0);
  const causes = {};
  for (const { failures } of state.instances)
    for (const [cause, count] of Object.entries(failures ?? {})) causes[cause] = (causes[cause] ?? 0) + count;
  // Both sides count a hand-off: the larger number is that of hand-offs.
  const sides = ["source", "target"].map((side) => sum(state.instances.map((instance) => instance.handoffs?.[side] ?? 0)));
  at("under-way").textContent = Math.max(...sides);
  at("rate").textContent = `${bytes(Math.round(total))}/s`;
  at("requests").textContent = state.router.in_flight_requests;
  at("failed").textContent = sum(causes);
  at("rows").replaceChildren(...each.sort(([a], [b]) => b.type.localeCompare(a.type)).map(([instance, rate]) => row(instance, rate)),
    ...state.refused.map((refused) => {
      const reason = element("td", "reason", refused.reason);
      reason.colSpan = 5;
      return element("tr", "instance-row", element("td", "", "refused"), element("td", "", refused.http_address), reason);
    }));
  const sorted = Object.entries(causes).sort(([, a], [, b]) => b - a);
  at("causes").replaceChildren(...sorted.map(([cause, count]) => element("tr", "", element("td", "", cause), element("td", "", String(count)))));
  if (!sorted.length) at("causes").replaceChildren(element("tr", "", element("td", "quiet", "none")));
  rates.push(total);
  if (rates.length > POINTS) rates.shift();
  const most = Math.max(1, ...rates);
  at("line").setAttribute("points", rates.map((rate, x) => `${x + POINTS - rates.length},${(19 - 18 * rate / most).toFixed(2)}`).join(" "));
  before = { at_s: state.at_s, instances: noteChanges(state) };
}

async function look() {
  try {
    const answer = await fetch("/live", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    const state = await answer.json();
    if (!answer.ok) throw new Error(state.error?.message ?? `the router answered ${answer.status}`);
    if (state.at_s !== before?.at_s) show(state);
    at("state").textContent = state.not_shown ? `live · ${state.not_shown} more instances are not shown` : "live";
  } catch (error) {
    at("state").textContent = error instanceof TypeError ? "The router does not answer. Is it still running?" : error.message;
  }
  setTimeout(look, EVERY_MS);
}

look();
