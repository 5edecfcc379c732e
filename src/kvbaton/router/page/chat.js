// The conversation: sends it, shows what comes back, lets the reader stop it.
import { button, element } from "./dom.js";
import { watchInstances } from "./instances.js";
import { complete } from "./stream.js";
import { timeline } from "./timeline.js";
import { timing } from "./timing.js";

const EXAMPLES = ["What is the capital of France?", "Explain a relay race in two sentences.", "Write a haiku about memory."];

const at = (id) => document.getElementById(id);
const [conversation, prompt, send, stop, reset] = ["conversation", "prompt", "send", "stop", "reset"].map(at);
let messages = [];
let running = null;
let model = "";

function turn(role, text) {
  const node = element("div", `turn ${role}`, element("div", "text", text));
  conversation.append(node);
  return node;
}

function follow(change) {
  const isAtEnd = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 80;
  change();
  if (isAtEnd) conversation.scrollTop = conversation.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  reset.hidden = messages.length === 0;
}

function request() {
  const temperature = Number(at("temperature").value);
  return {
    ...(model && { model }), messages, max_tokens: Math.max(1, Math.round(Number(at("max-tokens").value)) || 256),
    temperature: Number.isFinite(temperature) ? temperature : 0,
  };
}

function problem(error, node) {
  const again = button("Try again", () => {
    if (running) return;
    node.remove();
    answer();
  });
  return element("div", "problem", element("b", "", error.message), element("div", "", error.advice ?? "Try again."), again);
}

async function answer() {
  const controller = new AbortController();
  const node = turn("assistant writing", "");
  const place = node.firstChild;
  const started = performance.now();
  let [text, record, firstS, transfer] = ["", null, null, null];
  setRunning(controller);
  conversation.scrollTop = conversation.scrollHeight;
  try {
    for await (const piece of complete(request(), controller.signal)) {
      record = piece.record ?? record;
      transfer = piece.transfer ?? transfer;
      if (!piece.text) continue;
      firstS ??= (performance.now() - started) / 1000;
      text += piece.text;
      follow(() => { place.textContent = text; });
    }
    if (!text) follow(() => node.append(element("div", "note quiet", "The model had nothing to say.")));
  } catch (error) {
    if (running !== controller) return;
    const stopped = controller.signal.aborted;
    transfer = error.transfer ?? transfer;
    follow(() => node.append(stopped ? element("div", "note quiet", "Stopped.") : problem(error, node)));
    if (!stopped) text = "";
  } finally {
    node.classList.remove("writing");
    if (running === controller) finish(node, text, record, firstS, transfer);
  }
}

function finish(node, text, record, firstS, transfer) {
  if (text) messages.push({ role: "assistant", content: text });
  if (firstS !== null) follow(() => node.append(timing(record, firstS)));
  if (transfer) follow(() => node.append(timeline(transfer, conversation)));
  setRunning(null);
  prompt.focus();
}

function say(text) {
  if (!text.trim() || running) return;
  at("welcome").hidden = true;
  conversation.querySelectorAll(".problem button").forEach((old) => old.remove());
  if (messages.at(-1)?.role === "user") messages.pop();
  messages.push({ role: "user", content: text });
  turn("user", text);
  answer();
}

function submit(event) {
  event.preventDefault();
  if (running) return;
  const text = prompt.value;
  prompt.value = "";
  grow();
  say(text);
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function clear() {
  running?.abort();
  messages = [];
  setRunning(null);
  conversation.replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  prompt.focus();
}

at("composer").addEventListener("submit", submit);
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
stop.addEventListener("click", () => running?.abort());
reset.addEventListener("click", clear);
at("examples").append(...EXAMPLES.map((text) => button(text, () => say(text))));
watchInstances(at("instances"), (name) => { model = name; at("model").textContent = name; });
