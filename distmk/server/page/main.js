/* The composer, the drawers of narrow screens, and the keyboard. */

import "./theme.js";
import {useKey} from "./api.js";
import {ask, isAnswering, onChange, openChat, stop} from "./conversation.js";
import {$, button} from "./dom.js";
import {onModel, served, watch} from "./kernel.js";
import {onOpen, refreshChats} from "./sidebar.js";
import {newChat} from "./store.js";

const IDEAS = ["Explain photosynthesis in three sentences", "Write a haiku about GPUs", "What is a black hole?"];
const DRAWERS = [["chats", "chats-button"], ["panel", "panel-button"]];

function showComposer() {
  const send = $("send"), answering = isAnswering();
  send.textContent = answering ? "Stop" : "Send";
  send.classList.toggle("stop", answering);
  send.disabled = !answering && (served.model === null || !$("prompt").value.trim());
  for (const idea of $("ideas").children) idea.disabled = served.model === null;
}
function fitPrompt() { const box = $("prompt"); box.style.height = "auto"; box.style.height = box.scrollHeight + "px"; }
$("prompt").oninput = () => { fitPrompt(); showComposer(); };
$("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!isAnswering()) $("form").requestSubmit(); }
};
$("form").onsubmit = event => {
  event.preventDefault();
  if (isAnswering()) return stop();
  const content = $("prompt").value.trim();
  $("prompt").focus();
  if (!content || served.model === null) return;
  $("prompt").value = "";
  fitPrompt();
  ask(content);
};
$("key-form").onsubmit = event => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key-form").hidden = true;
  $("form").requestSubmit();
};
$("new").onclick = () => { openChat(newChat()); openDrawer(null); $("prompt").focus(); };
$("ideas").append(...IDEAS.map(idea => button(idea, "", () => { if (!isAnswering()) ask(idea); })));

/* Open one drawer, or none */
function openDrawer(name) {
  for (const [drawer, opener] of DRAWERS) {
    const wasOpen = $(drawer).classList.contains("open"), opens = drawer === name;
    $(drawer).classList.toggle("open", opens);
    $(opener).setAttribute("aria-expanded", String(opens));
    if (opens) $(drawer).querySelector(".close").focus();
    else if (wasOpen && name === null) $(opener).focus();
  }
}
const isOpen = drawer => $(drawer).classList.contains("open") && getComputedStyle($(drawer)).position === "fixed";
for (const [drawer, opener] of DRAWERS) {
  $(opener).onclick = () => openDrawer(isOpen(drawer) ? null : drawer);
  $(drawer).querySelector(".close").onclick = () => openDrawer(null);
}
onOpen(() => { if (isOpen("chats")) openDrawer(null); });

addEventListener("keydown", event => {
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    openDrawer("chats");
    $("search").select();
  } else if (event.key === "Escape") {
    if (DRAWERS.some(([drawer]) => isOpen(drawer))) openDrawer(null); else stop();
  }
});

onChange(() => { showComposer(); refreshChats(); });
onModel(showComposer);
openChat(newChat());
watch();
