/* Markdown as nodes. What a model writes is text to the parser (no raw HTML), and passes a sanitizer that knows few tags. */

import {copyButton, element} from "./dom.js";
import {math} from "./math.js";

const {markdownit, DOMPurify, hljs, katex} = globalThis;
const MOST_HIGHLIGHTED = 30_000;   // characters of a block of code; more would hold up a stream
const MATH = {throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200};
const SAFE = {
  ALLOWED_TAGS: ["p", "br", "hr", "a", "strong", "em", "s", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5", "h6",
    "table", "thead", "tbody", "tr", "th", "td", "span"],
  ALLOWED_ATTR: ["href", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/* Images are links: the page loads nothing from elsewhere */
const md = markdownit({html: false, linkify: true, breaks: true}).disable("image").use(math);
md.linkify.set({fuzzyLink: false, fuzzyEmail: false});
for (const cell of ["th_open", "td_open"]) md.renderer.rules[cell] = (tokens, index) => {
  const align = /^text-align:(left|center|right)$/.exec(tokens[index].attrGet("style") ?? "");
  return `<${tokens[index].tag}${align ? ` class="${align[1]}"` : ""}>`;
};

/* Text that grows: blocks that are as they were stay in the document */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.blocks = [];   // of HTML and its nodes
  }

  show(text) {
    const blocks = htmlBlocks(asFence(text) ?? text);
    let same = 0;
    while (same < blocks.length && same < this.blocks.length && blocks[same] === this.blocks[same].html) same += 1;
    for (const old of this.blocks.splice(same)) for (const node of old.nodes) node.remove();
    for (const html of blocks.slice(same)) {
      const fragment = nodesOf(html), nodes = [...fragment.childNodes];
      this.node.append(fragment);
      this.blocks.push({html, nodes});
    }
  }
}

/* A whole answer that is a JSON object or list, as a block of code; null: it is something else */
function asFence(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  try { return "````json\n" + JSON.stringify(JSON.parse(text), null, 2) + "\n````"; } catch { return null; }
}

function htmlBlocks(text) {
  const env = {}, tokens = md.parse(text, env), blocks = [];
  let begin = 0, depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth > 0) return;
    blocks.push(md.renderer.render(tokens.slice(begin, index + 1), md.options, env));
    begin = index + 1;
  });
  return blocks;
}

function nodesOf(html) {
  const nodes = DOMPurify.sanitize(html, SAFE);
  for (const pre of nodes.querySelectorAll("pre")) dressCode(pre);
  for (const span of nodes.querySelectorAll("span.math")) showMath(span);
  for (const link of nodes.querySelectorAll("a")) { link.target = "_blank"; link.rel = "noopener noreferrer nofollow"; }
  for (const table of nodes.querySelectorAll("table")) {
    const frame = element("div", "table");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return nodes;
}

function showMath(span) {
  const tex = span.textContent;
  try {
    katex.render(tex, span, {...MATH, macros: {}, displayMode: span.classList.contains("display")});
  } catch {   // it is no TeX, or not whole yet
    span.textContent = tex;
    span.classList.add("raw");
  }
}

/* A block of code with its language and a button to copy it */
function dressCode(pre) {
  const code = pre.querySelector("code"), text = code.textContent.replace(/\n$/, "");
  const language = /(?:^| )language-(\S+)/.exec(code.className)?.[1] ?? "";
  const head = element("div", "code-head", element("span", "", language || "text"), copyButton("quiet", () => text));
  code.replaceChildren(highlighted(text, language));
  code.className = "";
  pre.tabIndex = 0;
  const frame = element("div", "code");
  pre.replaceWith(frame);
  frame.append(head, pre);
}

/* Code as nodes, coloured if the language is known */
export function highlighted(text, language) {
  if (!hljs.getLanguage(language) || text.length > MOST_HIGHLIGHTED) return document.createTextNode(text);
  return DOMPurify.sanitize(hljs.highlight(text, {language, ignoreIllegals: true}).value, SAFE);
}
