/* The list of chats: they are opened, found, renamed, exported and deleted here. */

import {currentChat, openChat} from "./conversation.js";
import {$, button, download, element} from "./dom.js";
import {served} from "./kernel.js";
import {deleteChat, exported, listChats, loadChat, matches, newChat, onOtherTab, saveChat, titleOf} from "./store.js";

const list = $("chat-list");
const opened = new Set();   // the ids of chats whose actions are shown
let close = () => {};       // the drawer
export function onOpen(callback) { close = callback; }

/* Show them anew, unless one is being renamed */
export function refreshChats() { if (!list.querySelector("form")) showChats(); }

function showChats() {
  const chats = listChats(), query = $("search").value, found = chats.filter(chat => matches(chat, query));
  const focused = document.activeElement.closest("#chat-list li")?.dataset.id;
  list.replaceChildren(...found.map(entry));
  [...list.children].find(item => item.dataset.id === focused)?.querySelector(".title").focus();
  $("no-chats").textContent = chats.length ? "No chat has these words." : "Chats are kept in this browser.";
  $("no-chats").hidden = found.length > 0;
  $("export-all").hidden = chats.length === 0;
}

function entry(chat) {
  const isCurrent = chat.id === currentChat().id;
  const open = button(titleOf(chat), "title", () => { if (!isCurrent) openChat(loadChat(chat.id) ?? newChat()); close(); });
  open.title = titleOf(chat);
  if (isCurrent) open.setAttribute("aria-current", "true");
  const actions = element("div", "actions"), more = button("⋯", "quiet more", () => toggle(), `Actions for ${titleOf(chat)}`);
  const item = element("li", "", open, more);
  item.dataset.id = chat.id;
  const toggle = () => { if (!opened.delete(chat.id)) opened.add(chat.id); showActions(); };
  const showActions = () => { actions.hidden = !opened.has(chat.id); more.setAttribute("aria-expanded", String(!actions.hidden)); };
  showActions();
  actions.append(
    button("Rename", "quiet", () => rename(item, chat), `Rename ${titleOf(chat)}`),
    button("Export", "quiet", () => save(titleOf(chat), exported(chat)), `Export ${titleOf(chat)}`),
    button("Delete", "quiet", () => confirmDelete(actions, chat), `Delete ${titleOf(chat)}`),
  );
  item.append(actions);
  return item;
}

function rename(item, chat) {
  const box = element("input"), form = element("form", "", box);
  box.type = "text";
  box.value = titleOf(chat);
  box.setAttribute("aria-label", "Name of the chat");
  form.onsubmit = event => {
    event.preventDefault();
    const title = box.value.trim();
    if (title) change(chat.id, {title, isNamed: true});
    showChats();
  };
  form.onkeydown = event => { if (event.key === "Escape") { event.stopPropagation(); showChats(); } };
  item.replaceChildren(form);
  box.select();
}

/* The chat on the screen is a copy of its own, which is kept later */
function change(id, fields) {
  if (id === currentChat().id) Object.assign(currentChat(), fields);
  const kept = loadChat(id);
  if (kept) saveChat({...kept, ...fields});
}

function confirmDelete(actions, chat) {
  const yes = button("Delete it", "quiet warn", () => {
    if (chat.id === currentChat().id) {
      currentChat().isDeleted = true;   // an answer under way would keep it again
      openChat(newChat());
    }
    deleteChat(chat.id);
    showChats();
  });
  actions.replaceChildren(yes, button("Keep it", "quiet", showChats));
  yes.focus();
}

function save(name, value) {
  const file = name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
  download(`${file}.json`, JSON.stringify({model: served.model, ...value}, null, 2), "application/json");
}

$("search").oninput = showChats;
$("search").onkeydown = event => {
  if (event.key === "ArrowDown") { event.preventDefault(); list.querySelector(".title")?.focus(); }
};
list.onkeydown = event => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key], titles = [...list.querySelectorAll(".title")], at = titles.indexOf(document.activeElement);
  if (!step || at < 0) return;
  event.preventDefault();
  (titles[at + step] ?? (step < 0 ? $("search") : titles[at])).focus();
};
$("export-all").onclick = () => save("chats", {chats: listChats().map(exported)});
onOtherTab(refreshChats);
