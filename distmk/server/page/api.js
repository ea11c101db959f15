/* The server: requests, the events of a stream, and the key. */

const KEY = "distmk.key";   // kept for the tab
let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* no storage */ }

export const currentKey = () => key;
export function useKey(given) {
  key = given;
  try { sessionStorage.setItem(KEY, key); } catch { /* no storage */ }
}

/* The response. Throws what the user is to read: an error with `wantsKey`, or `isLong` where the conversation does not fit, alone
 * (`isAlone`) or with the tokens that are asked for */
async function post(path, body, signal) {
  const headers = {"content-type": "application/json"};
  if (key) headers.authorization = "Bearer " + key;
  const response = await fetch(path, {method: "POST", headers, body: JSON.stringify(body), signal})
    .catch(() => { throw new Error("The server does not answer."); });
  if (response.ok) return response;
  const {message, code, param} = (await response.json().catch(() => null))?.error ?? {message: `The server answers with status ${response.status}.`};
  const isLong = response.status === 413 || code === "context_length_exceeded", isAlone = isLong && param !== "max_tokens";
  throw Object.assign(new Error(message), {wantsKey: response.status === 401, isLong, isAlone});
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read().catch(() => ({done: true}));
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

/* What becomes of a request: the texts so far, calls of tools, times and usage */
export const newRun = () => ({
  text: "", thought: "", calls: [], count: 0, began: performance.now(), first: 0, last: 0, thoughtEnd: 0, reason: null, usage: null,
});

/* Stream a chat's answer into `run`, calling `show` after each event. Throws as `post` */
export async function stream(body, signal, run, show) {
  const asked = {...body, stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}};
  for await (const event of events(await post("v1/chat/completions", asked, signal))) {
    if (event.error) throw new Error(event.error.message);
    run.usage = event.usage ?? run.usage;
    const choice = event.choices[0];
    if (!choice) continue;
    run.last = performance.now();
    run.first ||= run.last;
    run.count += 1;
    const {content, reasoning_content: thought, tool_calls: calls} = choice.delta;
    run.thought += thought ?? "";
    if (thought) run.thoughtEnd = run.last;
    run.text += content ?? "";
    for (const call of calls ?? []) addCall(run.calls, call);
    run.reason = choice.finish_reason ?? run.reason;
    show();
  }
  if (run.reason === null) throw new Error("The connection broke off before the answer was whole.");
}

function addCall(calls, {index, id, function: {name, arguments: text}}) {
  calls[index] ??= {id, name, arguments: "", output: null};
  calls[index].arguments += text ?? "";
}

/* Tokens of a conversation; Infinity: more than the server reads */
export async function countTokens(model, messages, tools) {
  try {
    return (await (await post("tokenize", {model, messages, tools})).json()).count;
  } catch (error) {
    if (error.isLong || /characters|context/.test(error.message)) return Infinity;
    throw error;
  }
}

/* The state of the engine. Throws an error whose `isSaid` tells that the message is the server's */
export async function fetchStats() {
  const response = await fetch("stats", {signal: AbortSignal.timeout(5000)});
  if (!response.ok) throw Object.assign(new Error((await response.json()).error.message), {isSaid: true});
  return response.json();
}
