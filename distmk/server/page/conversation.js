/* The chat on the screen: what is asked, what is answered, and what of it is kept. */

import {countTokens, currentKey, newRun, stream} from "./api.js";
import {$} from "./dom.js";
import {served, showContext} from "./kernel.js";
import {requestFields, systemMessages} from "./settings.js";
import {messagesOf, newChat, saveChat} from "./store.js";
import {ExchangeView, factsOf} from "./view.js";

const REDRAW_MS = 50;
const log = $("log");

let chat = newChat();
let views = [];
let answering = null;   // the AbortController of the answer under way
let tooLong = null;     // the question that did not fit, and its place
let hasRoom = true;     // the browser could keep the last answer
let changed = () => {};

export const currentChat = () => chat;
export const isAnswering = () => answering !== null;
export const stop = () => answering?.abort();
export function onChange(callback) { changed = callback; }

/* Show a chat; an answer under way ends there */
export function openChat(opened) {
  answering?.abort();
  answering = tooLong = null;
  for (const view of views) view.node.remove();
  chat = opened;
  views = chat.exchanges.map(makeView);
  log.append(...views.map(view => view.node));
  showProblem("");
  showState();
  scrollDown();
}

export function showProblem(text, canDrop = false) {
  $("problem").firstElementChild.textContent = text;
  $("problem").hidden = !text;
  $("drop").hidden = !canDrop;
}

/* The end stays in sight for who reads it, when the composer grows, a problem is shown or a keyboard takes room */
let atEnd = true, logHeight = 0;
const follows = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
function scrollDown() { log.scrollTop = log.scrollHeight; }
log.onscroll = () => { if (log.clientHeight === logHeight) atEnd = follows(); };
new ResizeObserver(() => { logHeight = log.clientHeight; if (atEnd) scrollDown(); }).observe(log);

function makeView(exchange) {
  return new ExchangeView(exchange, {
    edit: (view, question) => { if (!answering) ask(question, views.indexOf(view)); },
    again: view => { if (!answering) ask(view.exchange.question, views.indexOf(view)); },
    sendResults: view => { if (!answering) continueWithResults(view); },
  });
}

function showState() {
  document.body.dataset.state = answering ? "answering" : "idle";
  $("empty").hidden = views.length > 0;
  views.forEach((view, index) => {
    const isLast = index === views.length - 1;
    view.node.classList.toggle("left-out", index < chat.from);
    view.node.querySelectorAll(".again").forEach((each, step, all) => { each.hidden = Boolean(answering) || !isLast || step < all.length - 1; });
    for (const each of view.node.querySelectorAll(".edit, .results .send, .editor .send")) each.disabled = Boolean(answering);
    for (const each of view.node.querySelectorAll(".results > .send, .results textarea")) each.hidden = !isLast;
  });
  if (!answering) showContext(chat.exchanges.at(-1)?.numTokens ?? 0);
  changed();
}

/* Ask a question in place of the exchanges from `index` on, which come back if there is no answer */
export async function ask(question, index = chat.exchanges.length) {
  const mine = chat, old = views.slice(index), exchange = {question, steps: [], numTokens: 0}, view = makeView(exchange);
  for (const each of old) each.node.remove();
  views.splice(index, old.length, view);
  log.append(view.node);
  const {isAnswered, error} = await answer(view, mine.exchanges.slice(mine.from, index));
  if (isAnswered) {
    mine.exchanges.splice(index, mine.exchanges.length, exchange);
    mine.from = Math.min(mine.from, index);
    keep(mine);
  } else if (mine === chat) {
    view.node.remove();
    views.splice(index, 1, ...old);
    log.append(...old.map(each => each.node));
    old.forEach(each => each.showQuestion());
    if (!old.length) giveBack(question);
    else if (old[0].exchange.question !== question) old[0].edit(question);
  }
  if (mine === chat) settle(error, {question, index, isEdit: old.length > 0});
}

async function continueWithResults(view) {
  const mine = chat, index = views.indexOf(view);
  const {isAnswered, error} = await answer(view, mine.exchanges.slice(mine.from, index));
  if (isAnswered) keep(mine);
  else for (const call of view.exchange.steps.at(-1).calls) call.output = null;
  if (mine !== chat) return;
  view.steps.forEach((each, number) => each.finish(view.exchange.steps[number]));
  settle(error);
}

/* Get one more step of an exchange. Whether there is one now, and what went wrong */
async function answer(view, history) {
  const {exchange} = view, mine = chat, controller = answering = new AbortController(), run = newRun(), step = view.addStep();
  showProblem("");
  $("key-form").hidden = true;
  showState();
  scrollDown();
  let timer = 0, error = null;
  const draw = () => {
    const stay = follows();
    step.draw(run);
    if (run.usage && mine === chat) showContext(run.usage.total_tokens);
    if (stay) scrollDown();
  };
  const show = () => { timer ||= setTimeout(() => { timer = 0; draw(); }, run.count > 1 ? REDRAW_MS : 0); };
  try {
    const asked = exchange.steps.length ? messagesOf(exchange) : [{role: "user", content: exchange.question}];
    const messages = [...systemMessages(), ...history.flatMap(messagesOf), ...asked];
    await stream({model: served.model, messages, ...requestFields()}, controller.signal, run, show);
  } catch (caught) { error = caught; }
  clearTimeout(timer);
  if (mine === chat) answering = null;
  if (controller.signal.aborted) [run.reason, error] = ["stopped", null];
  const calls = run.calls.filter(Boolean), isAnswered = Boolean(run.text.trim() || calls.length || !(error || run.reason === "stopped"));
  if (isAnswered) {
    const thoughtSeconds = run.thought ? ((run.thoughtEnd - run.first) / 1000).toFixed(1) : null;
    exchange.steps.push({thought: run.thought, thoughtSeconds, text: run.text, calls, facts: factsOf(run)});
    exchange.numTokens = run.usage?.total_tokens ?? 0;
    step.finish(exchange.steps.at(-1));
  } else view.removeLastStep();
  return {isAnswered, error};
}

function settle(error, asked = null) {
  showState();
  scrollDown();
  tooLong = error?.isLong && asked ? asked : null;
  if (error?.wantsKey) return askForKey();
  if (!error?.isLong) return showProblem(error?.message ?? (hasRoom ? "" : "The browser has no room for this chat. Export or delete some chats."));
  const canDrop = tooLong !== null && tooLong.index > chat.from;
  const advice = `Shorten the message${canDrop ? "," : " or"} begin a new chat${canDrop ? ", or:" : "."}`;
  showProblem(`${error.isAlone ? "This does not fit into the model's context" : error.message}. ${advice}`, canDrop);
}

function keep(kept) {
  if (kept.isDeleted) return;
  if (!kept.isNamed) kept.title = kept.exchanges[0].question.trim().split("\n")[0].slice(0, 80);
  kept.updated = Date.now();
  hasRoom = saveChat(kept);
  changed();
}

/* A question without an answer returns to where it was written, before what was written since */
function giveBack(question) {
  write([question, $("prompt").value].filter(Boolean).join("\n"));
}
function write(text) {
  $("prompt").value = text;
  $("prompt").dispatchEvent(new Event("input"));
}

function askForKey() {
  $("key-title").textContent = currentKey() ? "The server refuses this API key." : "This server asks for an API key.";
  $("key").value = currentKey();
  $("key-form").hidden = false;
  $("key").select();
}

/* Send as few of the oldest exchanges less as make the question fit, and ask it again */
$("drop").onclick = async () => {
  const {question, index, isEdit} = tooLong, mine = chat;
  $("drop").disabled = true;
  try {
    const from = await firstThatFits(question, index);
    if (mine !== chat) return;
    if (from === null) return showProblem("This message alone does not fit into the model's context. Shorten it.");
    mine.from = from;
    if (!isEdit && $("prompt").value.startsWith(question)) write($("prompt").value.slice(question.length).trimStart());
    ask(question, index);
  } catch (error) {
    if (error.wantsKey) askForKey(); else showProblem(error.message);
  } finally { $("drop").disabled = false; }
};

async function firstThatFits(question, index) {
  const {tools, max_tokens: wanted} = requestFields();
  const room = Math.min(wanted ?? Infinity, Math.ceil(served.contextLength / 4));
  const fits = async from => {
    const messages = [...systemMessages(), ...chat.exchanges.slice(from, index).flatMap(messagesOf), {role: "user", content: question}];
    return await countTokens(served.model, messages, tools) <= served.contextLength - room;
  };
  let [low, high] = [chat.from + 1, index];
  if (!await fits(high)) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(middle)) high = middle; else low = middle + 1;
  }
  return low;
}
