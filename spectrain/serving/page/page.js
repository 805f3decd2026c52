// Chat with the server that gave this page, and show where each token came from.
// Everything that a user or a model wrote is set as text, never as HTML.

const SOURCES = {
  // the values of spectrain.decoding.Source: what the legend calls them, and what they mean
  root: ["target", "The target wrote these tokens itself."],
  draft: ["draft model", "A draft model guessed these tokens."],
  input: ["text so far", "These tokens continue an earlier place of the text."],
  datastore: ["datastore", "These tokens were found in a datastore."],
  logits: ["logits", "These tokens were the likeliest of the target's last distribution."],
  forward: ["forward table", "These tokens were found in SPECTRA's table of what follows."],
  backward: ["backward table", "These tokens were found in SPECTRA's table of what stands before."],
};
const PLAIN = "autoregressive";
const STOPPED = "Stopped.";
const BLOCK = 100; // nodes: a browser lays out a block as a whole, so a long text is several
const SLACK = 40; // pixels: so near to its end the chat keeps showing its end

const by = (id) => document.getElementById(id);
let model; // the target's entry of /v1/models
let turns = []; // of this chat, oldest first
let running = null; // the AbortController of the answer that is being written

function element(tag, name = "", text = "") {
  return Object.assign(document.createElement(tag), { className: name, textContent: text });
}

function button(text, action) {
  const node = Object.assign(element("button", "", text), { type: "button" });
  node.addEventListener("click", () => action(node));
  return node;
}

/** Change the chat. If its end was in sight, it still is. */
function following(change) {
  const chat = by("chat");
  const follows = chat.scrollHeight - chat.scrollTop - chat.clientHeight < SLACK;
  change();
  if (follows) chat.scrollTop = chat.scrollHeight;
}

// ---- the server

class Refusal extends Error {
  constructor(error, response) {
    super(error?.message ?? `status ${response?.status}`);
    this.status = response?.status;
    this.wait = response?.headers.get("Retry-After"); // seconds
  }
}

async function request(path, options) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { headers, ...options });
  if (response.ok) return response;
  throw new Refusal((await response.json().catch(() => null))?.error, response);
}

/** Yield the objects of a stream of server-sent events. A chunk may end anywhere, also within a character. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** Say what went wrong. A server that asks for a key gets the form for it shown. */
function sentence(error) {
  if (error.name === "AbortError") return STOPPED;
  if (error.name === "TypeError") return "The connection to the server was lost. Is it still running?";
  if (!(error instanceof Refusal)) return `The server's answer could not be read: ${error.message}`;
  if (error.status === 401) {
    by("ask-key").hidden = false;
    by("key").focus();
    return sessionStorage.getItem("key") ? "The server does not accept this key." : "The server asks for a key.";
  }
  if (error.status === 429) return `The server is busy. Try again ${error.wait ? `in ${error.wait} s` : "later"}.`;
  return `The server says: ${error.message}`;
}

// ---- one answer

class Answer {
  constructor(method, temperature) {
    Object.assign(this, { method, temperature, text: "", tokens: 0, accepted: 0, ended: false, statistics: null });
    this.waiting = []; // pieces that are not on the page yet
    this.node = element("section");
    this.body = element("div", "text");
    this.note = element("p", "note", "The prompt is being read …");
    this.note.title = "tau: tokens produced per forward pass of the target";
    this.actions = element("div", "line actions");
    this.foot = element("div", "line foot");
    this.foot.append(element("div"));
    this.foot.firstChild.append(this.note, this.actions);
    this.node.append(element("h3", "", method), this.body, this.foot);
  }

  /** Tokens per second behind the first tokens: the server's number, or until it comes what the page saw. */
  get rate() {
    const seconds = (this.now - this.start) / 1000;
    return this.statistics?.tokens_per_s ?? (seconds > 0 ? (this.tokens - this.first) / seconds : 0);
  }

  async write(messages, signal) {
    const { method, temperature } = this;
    const body = JSON.stringify({ model: model?.id, messages, method, temperature, stream: true, annotate: true });
    for await (const event of events(await request("v1/chat/completions", { method: "POST", body, signal }))) {
      if (event.error) throw new Refusal(event.error);
      this.add(event.spectrain?.pieces ?? []);
      const reason = event.choices[0]?.finish_reason;
      if (reason) Object.assign(this, { ended: true, reason, statistics: event.spectrain });
    }
    if (!this.ended) throw new TypeError("the stream ended before the answer");
  }

  add(pieces) {
    if (!pieces.length) return;
    this.now = performance.now();
    this.tokens += pieces.length;
    this.accepted += pieces.filter(([, source]) => source !== "root").length;
    if (!this.start) Object.assign(this, { start: this.now, first: this.tokens });
    this.text += pieces.map(([text]) => text).join("");
    this.waiting.push(...pieces);
    this.frame ||= requestAnimationFrame(() => following(() => this.draw()));
  }

  /** Append what has come since the last frame. Nothing that stands already is touched, or laid out anew. */
  draw() {
    for (let [text, source] of this.waiting) {
      const isFence = text.includes("```");
      const opens = isFence && !this.code;
      if (!this.block && this.body.lastChild?.className === "code" && text.startsWith("\n")) {
        this.body.lastChild.lastChild.append("\n"); // the line of the fence ends here
        text = text.slice(1);
      }
      if (opens) this.body.append((this.code = element("div", "code")));
      if (opens || !this.block) (this.code ?? this.body).append((this.block = element("div")));
      const word = text.trimStart(); // no line is drawn below the space before it
      const parts = [text.slice(0, text.length - word.length), word && element("span", source, word)];
      this.block.append(...parts.filter(Boolean));
      if (isFence && !opens) this.code = this.block = null;
      else if (text.endsWith("\n") && this.block.childNodes.length > BLOCK) this.block = null;
      by("legend").querySelector(`.${source}`).hidden = false;
    }
    if (this.tokens) this.note.textContent = this.summary();
    Object.assign(this, { waiting: [], frame: 0 });
  }

  summary() {
    const { method, tokens, accepted, drafted, tau } = this.statistics ?? this;
    const steps = this.tokens - this.accepted - 1; // each ends with a token of the target; the first one came before
    const length = tau ?? (steps > 0 ? (this.tokens - 1) / steps : 0);
    const parts = [
      method,
      this.rate && `${this.rate.toFixed(0)} tokens/s`,
      length && `tau ${length.toFixed(2)}`,
      `${tokens} tokens`,
      accepted + (drafted ?? 0) && `${accepted} ${drafted ? `of ${drafted} drafted ` : ""}accepted`,
      this.reason === "length" && "ended at the greatest length",
    ];
    return parts.filter(Boolean).join(" · ");
  }

  /** Show how it ended. `problem` is a sentence, or null. */
  end(problem) {
    cancelAnimationFrame(this.frame);
    this.draw();
    if (problem) this.note.textContent = this.tokens ? `${this.summary()} · ${problem}` : problem;
    this.note.classList.toggle("bad", Boolean(problem) && problem !== STOPPED);
    if (this.statistics?.drafted_by_position?.some(Boolean)) this.foot.append(positions(this.statistics));
  }
}

/** A bar per position of the draft: the share of its tokens that were accepted. */
function positions({ drafted_by_position: drafted, accepted_by_position: accepted }) {
  const [figure, bars] = [element("figure"), element("ol")];
  drafted.forEach((count, i) => {
    const share = count ? (accepted[i] ?? 0) / count : 0;
    const [item, bar] = [element("li", "", (100 * share).toFixed(0)), element("i")];
    item.title = `Position ${i + 1}: ${accepted[i] ?? 0} of ${count} accepted`;
    bar.style.height = `${36 * share}px`;
    item.append(bar);
    bars.append(item);
  });
  figure.append(element("figcaption", "note", "Accepted by position in the draft, in %"), bars);
  return figure;
}

// ---- the chat

function ask(question) {
  const system = by("system").value.trim();
  const turn = { node: element("article", "turn"), columns: element("div", "columns") };
  const earlier = turns.filter(({ answer }) => answer.text);
  turn.messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...earlier.flatMap(({ messages, answer }) => [messages.at(-1), { role: "assistant", content: answer.text }]),
    { role: "user", content: question },
  ];
  turn.node.append(element("p", "question", question), turn.columns);
  if (!turns.length) showLegend(["root"]);
  turns.push(turn);
  by("empty").hidden = true;
  by("turns").append(turn.node);
  by("chat").scrollTop = by("chat").scrollHeight;
  answer(turn);
}

async function answer(turn) {
  turn.answer = new Answer(by("method").value || undefined, Number(by("temperature").value));
  turn.columns.replaceChildren(turn.answer.node);
  const problem = await run(turn, turn.answer);
  const buttons = [];
  if (problem) buttons.push(button("Try again", () => running || answer(turn)));
  if (turn.answer.text) buttons.push(button("Copy", (node) => copy(turn.answer, node)));
  if (turn.answer.text && model?.methods.includes(PLAIN) && turn.answer.method !== PLAIN) {
    buttons.push(button("Plain decoding beside it", () => running || compare(turn)));
  }
  following(() => turn.answer.actions.append(...buttons));
}

/** Let the same question be answered without drafts, in a column beside the answer. */
async function compare(turn) {
  const plain = new Answer(PLAIN, turn.answer.temperature);
  const buttons = [...turn.answer.actions.children];
  turn.node.classList.add("compared");
  turn.columns.replaceChildren(turn.answer.node, plain.node);
  const problem = await run(turn, plain);
  if (problem) return turn.answer.actions.append(...buttons);
  const [ours, theirs] = [turn.answer.rate, plain.rate];
  const rates = `${ours.toFixed(0)} instead of ${theirs.toFixed(0)} tokens/s`;
  const ratio = `${(ours / theirs).toFixed(2)} times plain decoding: ${rates}.`;
  const speed = ours && theirs ? ratio : "The answers are too short to compare their speed.";
  const same = turn.answer.text === plain.text ? "Both texts are the same." : "The texts differ.";
  const texts = plain.temperature ? "Both texts were drawn at random." : same;
  const order = "They were written one after the other, because at the same time each would slow the other down.";
  following(() => {
    turn.columns.after(element("p", "verdict", [speed, texts, order].join(" ")));
    turn.answer.actions.append(...buttons.slice(0, -1));
  });
}

/** Let the server write an answer to a turn. Return what went wrong as a sentence, or null. */
async function run(turn, one) {
  const here = (running = new AbortController());
  turn.answer.actions.replaceChildren();
  showRunning();
  let problem = null;
  try {
    await one.write(turn.messages, here.signal);
  } catch (error) {
    problem = sentence(error);
  }
  following(() => one.end(problem));
  if (running === here) running = null;
  showRunning();
  return problem;
}

function showRunning() {
  const focus = document.activeElement === by("stop");
  by("turns").setAttribute("aria-busy", String(Boolean(running)));
  by("send").hidden = Boolean(running);
  by("stop").hidden = !running;
  if (focus) by("prompt").focus();
}

async function copy({ text, body }, node) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(body); // without HTTPS, browsers only let a page copy what is selected
    document.execCommand("copy");
  }
  node.textContent = "Copied";
}

function showLegend(sources) {
  const items = Object.entries(SOURCES).map(([source, [name, meaning]]) => {
    return Object.assign(element("li", source, name), { title: meaning, hidden: !sources.includes(source) });
  });
  by("legend").replaceChildren(...items);
}

function clear() {
  running?.abort();
  turns = [];
  by("turns").replaceChildren();
  by("empty").hidden = false;
  showLegend(Object.keys(SOURCES));
  by("prompt").focus();
}

function send(event) {
  event.preventDefault();
  const question = by("prompt").value.trim();
  if (!question || running) return;
  by("prompt").value = "";
  ask(question);
}

async function open() {
  by("problem").hidden = true;
  try {
    [model] = (await (await request("v1/models")).json()).data;
    by("target").textContent = model.id;
    document.title = `spectrain · ${model.id}`;
    by("method").replaceChildren(...model.methods.map((name) => new Option(name)));
  } catch (error) {
    by("problem").textContent = sentence(error);
    by("problem").hidden = false;
  }
}

by("compose").addEventListener("submit", send);
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
by("stop").addEventListener("click", () => running?.abort());
by("new").addEventListener("click", clear);
by("empty").addEventListener("click", (event) => event.target.closest("button") && ask(event.target.textContent));
by("temperature").addEventListener("input", ({ target }) => {
  target.nextElementSibling.textContent = Number(target.value).toFixed(1);
});
by("colours").addEventListener("change", ({ target }) => document.body.classList.toggle("plain", !target.checked));
by("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", by("key").value);
  by("key").value = "";
  by("ask-key").hidden = true;
  open();
});
showLegend(Object.keys(SOURCES));
open();
