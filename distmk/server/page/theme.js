/* The theme: the system's, until one is chosen. */

import {$, recall, remember} from "./dom.js";

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const dark = (recall("theme") ?? (systemDark.matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").title = `Use the ${dark ? "light" : "dark"} theme`;
  $("theme").setAttribute("aria-label", $("theme").title);
}
$("theme").onclick = () => { remember("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark"); showTheme(); };
systemDark.onchange = showTheme;
showTheme();
