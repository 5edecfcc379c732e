// Reads a chat completion as it is written, and says in words what went wrong when it does not come.

export class Problem extends Error {
  constructor(what, advice, transfer = null) {
    super(what);
    this.advice = advice;
    this.transfer = transfer;
  }
}

const transferOf = (answer) => answer.headers.get("X-KVBaton-Transfer");

const ADVICE = {
  400: "Change the message, or start a new chat if the conversation has grown too long.",
  404: "The model is not served here; reload the page.",
  413: "The conversation is too large. Start a new chat.",
  429: "The instances are busy. Wait a moment, then try again.",
  502: "An instance failed. Try again; if it goes on, look at its log.",
  503: "Start what is missing (kvbaton up starts everything), or wait until it has registered, then try again.",
};

async function refusal(answer) {
  let said = `The router answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message || said;
  } catch {
    // Not one of our error objects; the status has to do.
  }
  return new Problem(said, ADVICE[answer.status] ?? "Try again; if it goes on, look at the router's log.", transferOf(answer));
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value.replaceAll("\r\n", "\n");
    const whole = pending.split("\n\n");
    pending = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    return {};
  }
}

async function open(request, signal) {
  try {
    return await fetch("/v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...request, stream: true }), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The router cannot be reached.", "Is it still running? Start it again, then try again.");
  }
}

// Yields {transfer}, then {text} for each piece of the answer and {record} once, where the instance tells its times.
export async function* complete(request, signal) {
  const answer = await open(request, signal);
  if (!answer.ok) throw await refusal(answer);
  yield { transfer: transferOf(answer) };
  let finished = false;
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") { finished = true; break; }
      const chunk = parsed(data);
      if (chunk.error) throw new Problem(chunk.error.message ?? "The answer broke off.", ADVICE[502]);
      if (chunk.kvbaton) yield { record: chunk.kvbaton };
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) yield { text };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem("The connection broke in the middle of the answer.", ADVICE[502]);
  }
  if (!finished) throw new Problem("The answer broke off before its end.", ADVICE[502]);
}
