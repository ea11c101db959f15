/* One exchange on the screen: a question, and the steps of its answer. */

import {button, copyButton, element, formatNumber} from "./dom.js";
import {highlighted, Markdown} from "./markdown.js";

/* `actions`: edit(view, question), again(view), sendResults(view), which the conversation answers */
export class ExchangeView {
  constructor(exchange, actions) {
    this.exchange = exchange;
    this.actions = actions;
    this.node = element("section", "exchange");
    this.asked = element("article", "turn user");
    this.asked.setAttribute("aria-label", "You");
    this.node.append(this.asked);
    this.steps = [];
    this.showQuestion();
    for (const step of exchange.steps) this.addStep().finish(step);
  }

  showQuestion() {
    const edit = button("Edit", "quiet edit", () => this.edit(this.exchange.question), "Edit this message");
    this.asked.replaceChildren(element("div", "text", this.exchange.question), edit);
  }

  /* Put an editor in the question's place */
  edit(text) {
    const box = element("textarea"), form = element("form", "editor", box);
    const send = element("button", "send", "Ask again");
    const cancel = () => { this.showQuestion(); this.asked.querySelector(".edit").focus(); };
    box.value = text;
    box.setAttribute("aria-label", "Message");
    form.append(element("div", "", button("Cancel", "quiet", cancel), send));
    form.onsubmit = event => { event.preventDefault(); if (box.value.trim()) this.actions.edit(this, box.value.trim()); };
    form.onkeydown = event => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    };
    this.asked.replaceChildren(form);
    box.style.height = `${Math.min(box.scrollHeight + 4, 240)}px`;
    box.focus();
  }

  addStep() {
    const view = new StepView(this);
    this.steps.push(view);
    this.node.append(view.node);
    return view;
  }

  removeLastStep() {
    this.steps.pop().node.remove();
  }
}

/* One answer of the model */
class StepView {
  constructor(exchangeView) {
    this.exchangeView = exchangeView;
    this.node = element("article", "turn assistant");
    this.node.setAttribute("aria-label", "Answer");
    this.thought = element("div", "thought");
    this.summary = element("summary", "");
    this.thinking = element("details", "thinking", this.summary, this.thought);
    this.thinking.hidden = true;
    this.text = element("div", "text waiting");
    this.markdown = new Markdown(this.text);
    this.calls = element("div", "calls");
    this.numbers = element("div", "numbers");
    this.facts = element("div", "facts", this.numbers);
    this.node.append(this.thinking, this.text, this.calls, this.facts);
  }

  /* Show what has come so far */
  draw(run) {
    this.showThought(run.thought, run.text || run.calls.length ? "Thought" : "Thinking …");
    this.text.className = run.text || run.thought || run.calls.length ? "text streaming" : "text waiting";
    this.markdown.show(run.text.trimStart());
    this.calls.replaceChildren(...run.calls.map(call => callNode(call, false)));
    this.showFacts(factsOf(run));
  }

  /* Show a step that is over, with what can be done next */
  finish(step) {
    this.showThought(step.thought, step.thoughtSeconds ? `Thought for ${step.thoughtSeconds} s` : "Thought");
    this.text.className = "text";
    this.markdown.show(step.text.trimStart());
    this.showCalls(step.calls);
    this.showFacts(step.facts);
    for (const old of this.facts.querySelectorAll("button")) old.remove();
    if (step.text) this.facts.append(copyButton("quiet", () => step.text));
    this.facts.append(button("Ask again", "quiet again", () => this.exchangeView.actions.again(this.exchangeView)));
  }

  showThought(text, title) {
    this.thinking.hidden = !text;
    if (!text) return;
    this.summary.textContent = title;
    if (this.thought.textContent !== text) this.thought.textContent = text;
  }

  showFacts(facts) {
    this.numbers.replaceChildren(...facts.map(([value, name]) => element("span", "", ...(value ? [element("b", "", value), " "] : []), name)));
  }

  /* Calls, with a box for each answer that is missing */
  showCalls(calls) {
    this.calls.replaceChildren(...calls.map(call => callNode(call, true)));
    if (!calls.some(call => call.output === null)) return;
    const send = element("button", "send", "Send results"), form = element("form", "results");
    form.append(...this.calls.childNodes, send);
    form.onsubmit = event => {
      event.preventDefault();
      form.querySelectorAll("textarea").forEach((box, index) => { calls[index].output = box.value; });
      this.exchangeView.actions.sendResults(this.exchangeView);
    };
    this.calls.append(form);
  }
}

function callNode(call, isOver) {
  const head = element("div", "code-head", element("span", "", "Calls ", element("b", "", call.name)));
  const node = element("div", "code call", head, element("pre", "", element("code", "", highlighted(pretty(call.arguments, isOver), "json"))));
  if (!isOver) return node;
  if (call.output !== null) {
    node.append(element("div", "code-head", "Result"), element("pre", "", element("code", "", highlighted(pretty(call.output, true), "json"))));
    return node;
  }
  const box = element("textarea");
  box.rows = 2;
  box.placeholder = "what the tool answers";
  box.setAttribute("aria-label", `Result of ${call.name}`);
  node.append(box);
  return node;
}

function pretty(text, isWhole) {
  if (!isWhole) return text;
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/* Pairs of a value and its name */
export function factsOf(run) {
  if (!run.first) return [];
  const tokens = run.usage ? run.usage.completion_tokens : run.count, seconds = (run.last - run.first) / 1000;
  const facts = [[(run.first - run.began).toFixed(0) + " ms", "to first token"], [formatNumber(tokens), tokens === 1 ? "token" : "tokens"]];
  if (tokens > 1 && seconds > 0) facts.splice(1, 0, [((tokens - 1) / seconds).toFixed(1), "tokens/s"]);
  if (run.reason === "length") facts.push(["", "ended at the token limit"]);
  if (run.reason === "stopped") facts.push(["", "stopped by you"]);
  return facts;
}
