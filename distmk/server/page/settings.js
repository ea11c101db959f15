/* Settings. One that nobody changed is not sent: the server has the model's own defaults. */

import {$, recall, remember} from "./dom.js";

const RANGES = {temperature: 1, top_p: 1, min_p: 0, repetition_penalty: 1};   // where a slider stands that nobody moved
const NUMBERS = [...Object.keys(RANGES), "top_k", "seed", "max_tokens"];
const SETTINGS = [...NUMBERS, "stop", "system", "tools"];
const settings = {};

function show() {
  for (const name of SETTINGS) $(name).value = settings[name] || (RANGES[name] ?? "");
  for (const name in RANGES) $(name + "-value").textContent = settings[name] ? Number(settings[name]).toFixed(2) : "model's default";
  showToolsProblem();
}
function change(name, value) { settings[name] = value; remember("setting." + name, value); }
function load(from) { for (const name of SETTINGS) change(name, from(name) ?? ""); show(); }

/* The tools that the model may call; null: there are none. Throws what is wrong with them */
function readTools() {
  const text = settings.tools.trim();
  if (!text) return null;
  let tools;
  try { tools = JSON.parse(text); } catch (error) { throw new Error(`The tools in the settings are not JSON: ${error.message}`); }
  if (!Array.isArray(tools)) throw new Error("The tools in the settings are no list: put them into [ ].");
  return tools.length ? tools : null;
}
function showToolsProblem() {
  let problem = "";
  try { readTools(); } catch (error) { problem = error.message; }
  $("tools-problem").textContent = problem;
  $("tools-problem").hidden = !problem;
}

/* The fields of a request beside its messages. Throws what the user is to read */
export function requestFields() {
  const fields = {};
  for (const name of NUMBERS) if (settings[name]) fields[name] = Number(settings[name]);
  if (settings.stop) fields.stop = [settings.stop.replaceAll("\\n", "\n")];
  const tools = readTools();
  if (tools) fields.tools = tools;
  return fields;
}
export const systemMessages = () => settings.system.trim() ? [{role: "system", content: settings.system}] : [];

for (const name of SETTINGS) $(name).oninput = () => {
  change(name, $(name).value);
  if (name in RANGES) show();
  if (name === "tools") showToolsProblem();
};
$("reset").onclick = () => load(() => "");
load(name => recall("setting." + name));
