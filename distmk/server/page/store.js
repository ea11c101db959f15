/* Chats, which the browser keeps: one item of its storage each. */

const PREFIX = "distmk.chat.";

/* A chat is {id, title, isNamed, updated, from, exchanges}. `from`: the number of exchanges that are no longer sent. An exchange
 * is {question, steps, numTokens}, and a step {thought, text, calls, facts}: there is one more after each round of tools */
export const newChat = () => ({id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", isNamed: false, updated: 0, from: 0, exchanges: []});

export function titleOf(chat) {
  return chat.title || "New chat";
}

/* All chats, the newest first */
export function listChats() {
  const chats = [];
  try {
    for (let index = 0; index < localStorage.length; index += 1) {
      const name = localStorage.key(index);
      const chat = name.startsWith(PREFIX) ? parse(localStorage.getItem(name)) : null;
      if (chat) chats.push(chat);
    }
  } catch { /* no storage */ }
  return chats.sort((one, other) => other.updated - one.updated);
}

export function loadChat(id) {
  try { return parse(localStorage.getItem(PREFIX + id)); } catch { return null; }
}

/* Whether there was room for it */
export function saveChat(chat) {
  try { localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat)); return true; } catch { return false; }
}

export function deleteChat(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* no storage */ }
}

/* Call `changed` when another tab has changed a chat */
export function onOtherTab(changed) {
  addEventListener("storage", event => { if (event.key === null || event.key.startsWith(PREFIX)) changed(); });
}

/* Whether all words of `query` are in the chat */
export function matches(chat, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [titleOf(chat), ...chat.exchanges.flatMap(each => [each.question, ...each.steps.map(step => step.text)])].join("\n").toLowerCase();
  return words.every(word => text.includes(word));
}

/* Messages as the API takes them */
export function messagesOf(exchange) {
  return [{role: "user", content: exchange.question}, ...exchange.steps.flatMap(messagesOfStep)];
}
function messagesOfStep({thought, text, calls}) {
  if (!calls.length) return [{role: "assistant", content: text}];
  const called = calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}));
  const message = {role: "assistant", content: text || null, tool_calls: called};
  if (thought) message.reasoning_content = thought;
  return [message, ...calls.map(call => ({role: "tool", tool_call_id: call.id, content: call.output ?? ""}))];
}

export function exported(chat) {
  return {title: titleOf(chat), updated: new Date(chat.updated).toISOString(), messages: chat.exchanges.flatMap(messagesOf)};
}

function parse(text) {
  try {
    const chat = JSON.parse(text);
    return chat && typeof chat.id === "string" && Array.isArray(chat.exchanges) && chat.exchanges.every(each => Array.isArray(each.steps)) ? chat : null;
  } catch { return null; }
}
