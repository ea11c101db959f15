/* The panel that shows the kernel at work, and what the server serves. */

import {fetchStats} from "./api.js";
import {$, element, formatNumber} from "./dom.js";

export const served = {model: null, contextLength: 0};
let changed = () => {};
export function onModel(callback) { changed = callback; }

const LINE = 60;   // samples
const samples = {iteration: [], rate: []};
let before = null, usedTokens = 0;

function push(name, value) {
  if (!samples[name].length) samples[name] = Array(LINE).fill(name === "rate" ? 0 : value);
  samples[name].push(value);
  samples[name].shift();
  drawLine(name);
}
function drawLine(name) {
  const values = samples[name], top = Math.max(...values, 1e-9) * 1.1;
  const points = values.map((value, index) => `${index} ${(30 - 28 * value / top).toFixed(2)}`);
  const svg = $(name + "-line");
  if (!svg.firstChild) for (const kind of ["area", "line"]) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", kind);
    svg.append(path);
  }
  svg.children[0].setAttribute("d", `M0 30L${points.join("L")}L${LINE - 1} 30Z`);
  svg.children[1].setAttribute("d", `M${points.join("L")}`);
}
function showValue(id, value, unit) {
  $(id).replaceChildren(value);
  if (unit) $(id).append(" ", element("small", "", unit));
}

/* Tokens of the chat on the screen */
export function showContext(used = usedTokens) {
  const most = served.contextLength;
  usedTokens = used;
  showValue("context", formatNumber(used), most ? `of ${formatNumber(most)} tokens` : "tokens");
  $("context-bar").style.width = most ? `${Math.min(100, 100 * used / most)}%` : "0";
}
function showState(state, text) { $("state").dataset.state = state; $("state").firstElementChild.textContent = text; }

function showModel(stats) {
  served.model = stats.model;
  served.contextLength = stats.max_model_len;
  $("model").textContent = $("model").title = document.body.dataset.model = stats.model;
  document.title = `${stats.model} · distmk`;
  showContext();
  changed();
}

function showStats(stats) {
  const now = performance.now(), used = stats.num_kv_pages - stats.num_free_kv_pages;
  // At first, and when another server has taken its place.
  if (served.model !== stats.model || served.contextLength !== stats.max_model_len) showModel(stats);
  showValue("running", formatNumber(stats.num_running), stats.num_running === 1 ? "sequence" : "sequences");
  showValue("waiting", formatNumber(stats.num_waiting), stats.num_waiting === 1 ? "sequence" : "sequences");
  showValue("pages", formatNumber(used), `of ${formatNumber(stats.num_kv_pages)} in use`);
  $("pages-bar").style.width = stats.num_kv_pages ? `${100 * used / stats.num_kv_pages}%` : "0";
  showValue("iteration", stats.iteration_ms.toFixed(2), "ms");
  push("iteration", stats.iteration_ms);
  if (before) {
    const rate = (stats.num_generated_tokens - before.tokens) / (now - before.now) * 1000;
    showValue("rate", rate < 100 ? rate.toFixed(1) : formatNumber(Math.round(rate)), "tokens/s");
    push("rate", rate);
  }
  before = {now, tokens: stats.num_generated_tokens};
  const totals = [[stats.num_iterations, "iterations"], [stats.num_prompt_tokens, "prompt tokens"], [stats.num_generated_tokens, "new tokens"],
    [stats.num_prefix_hits, "tokens read from cached prefixes"], [stats.num_preemptions, "preemptions"]];
  $("totals").textContent = totals.filter(([count]) => count).map(([count, name]) => `${formatNumber(count)} ${name}`).join(", ");
  showState(stats.num_running ? "busy" : "ready", stats.num_running ? "generating" : "idle");
}

export async function watch() {
  if (!document.hidden) {
    try {
      showStats(await fetchStats());
      $("live").hidden = false;
      $("gone").hidden = true;
    } catch (error) {
      showState("gone", "not reachable");
      $("gone").textContent = error.isSaid ? error.message : "The server does not answer.";
      $("gone").hidden = false;
      $("live").hidden = true;
      before = null;
    }
  }
  setTimeout(watch, 1000);
}
