/* A plugin of markdown-it for formulas: $...$, $$...$$, \(...\) and \[...\] become spans that hold their TeX. */

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const MOST = 4000;   // characters of a formula, so that an end is not looked for in all of a text
const MOST_LINES = 100;

const pairAt = (text, at) => PAIRS.find(([open]) => text.startsWith(open, at));

function inline(state, silent) {
  const {src, pos} = state, pair = pairAt(src, pos);
  if (!pair) return false;
  const [open, close, isDisplay] = pair, begin = pos + open.length;
  const length = src.slice(begin, begin + MOST).indexOf(close);
  if (length < 1) return false;
  const tex = src.slice(begin, begin + length), end = begin + length + close.length;
  // Amounts of money are no formulas.
  if (!tex.trim() || open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(src[end] ?? ""))) return false;
  if (!silent) push(state, tex, isDisplay);
  state.pos = end;
  return true;
}

/* Lines of a formula are no lists or headings */
function block(state, first, last, silent) {
  const begin = state.bMarks[first] + state.tShift[first], pair = pairAt(state.src, begin);
  if (!pair?.[2]) return false;
  const [open, close] = pair;
  for (let line = first; line < Math.min(last, first + MOST_LINES); line += 1) {
    const from = line === first ? begin + open.length : state.bMarks[line];
    const text = state.src.slice(from, state.eMarks[line]), at = text.indexOf(close);
    if (at < 0) continue;
    if (text.slice(at + close.length).trim()) return false;
    if (!silent) {
      const tex = state.getLines(first, line + 1, state.blkIndent, false).trim().slice(open.length, -close.length);
      push(state, tex, true).map = [first, line + 1];
      state.line = line + 1;
    }
    return true;
  }
  return false;
}

function push(state, tex, isDisplay) {
  const token = state.push("math", "", 0);
  token.content = tex;
  token.info = isDisplay ? "math display" : "math";
  return token;
}

export function math(md) {
  md.inline.ruler.before("escape", "math", inline);
  md.block.ruler.before("fence", "math", block, {alt: ["paragraph", "reference", "blockquote", "list"]});
  md.renderer.rules.math = (tokens, index) => `<span class="${tokens[index].info}">${md.utils.escapeHtml(tokens[index].content)}</span>`;
}
