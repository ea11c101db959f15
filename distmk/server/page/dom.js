/* Small helpers: elements, numbers, and what the browser keeps. */

export const $ = id => document.getElementById(id);

const numbers = new Intl.NumberFormat("en");
export const formatNumber = value => numbers.format(value);

/* An element; text never becomes markup */
export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(text, className, onClick, label) {
  const made = element("button", className, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.onclick = onClick;
  return made;
}

/* A button that copies what `text` gives */
export function copyButton(className, text) {
  const made = button("Copy", className, async () => {
    try { await navigator.clipboard.writeText(text()); made.textContent = "Copied"; } catch { made.textContent = "Cannot copy"; }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

/* Give the user a file */
export function download(name, text, type) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function remember(name, value) { try { localStorage.setItem("distmk." + name, value); } catch { /* no storage */ } }
export function recall(name) { try { return localStorage.getItem("distmk." + name); } catch { return null; } }
