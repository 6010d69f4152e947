// A trajectory as blocks of tokens of one origin, with the message, spans, feedback and incidents of each block.

import { contentText } from "./format.js";
import { Pieces } from "./pieces.js";

export const NO_VERSION = -1;

/** Consecutive tokens of one origin: the prompt, a completion or a reply. */
class Block {
  constructor(origin, start) {
    this.origin = origin;
    this.start = start;
    this.end = start;
    this.turn = null;
    this.spans = [];
    this.calls = [];
    this.feedback = [];
    this.incidents = [];
    this.message = null;
  }

  get length() {
    return this.end - this.start;
  }

  get seconds() {
    return this.spans.reduce((sum, span) => sum + span.end - span.start, 0);
  }
}

export class Trajectory {
  constructor({ meta, columns }) {
    this.meta = meta;
    const array = (name) => columns.get(name)?.values ?? null;
    this.ids = array("ids");
    this.mask = array("mask");
    this.versions = array("versions");
    this.logProbs = array("logprobs");
    this.trainLogProbs = array("train_logprobs");
    this.advantages = array("advantages");
    this.pieces = new Pieces(array("used_ids"), meta.pieces);
    this.promptLength = meta.prompt_length ?? 0;
    this.spans = listOf(meta.spans).filter(Array.isArray).map(spanOf);
    this.messages = listOf(meta.messages).filter((message) => message && typeof message === "object");
    this.feedback = listOf(meta.feedback);
    this.incidents = listOf(meta.incidents);
    this.blocks = blocksOf(this);
    this.turns = this.blocks.filter((block) => block.origin === "model");
    this.turns.forEach((block, index) => (block.turn = index + 1));
    this.#place();
  }

  get length() {
    return this.ids.length;
  }

  /** Returns the trainer's log-prob minus the rollout's; NaN if one of them is unknown. */
  difference(token) {
    if (!this.trainLogProbs || !this.logProbs || !this.mask[token]) return NaN;
    return this.trainLogProbs[token] - this.logProbs[token];
  }

  /** Whether the texts of the tokens are known. */
  get hasTexts() {
    return this.meta.pieces?.some((piece) => piece !== null) ?? false;
  }

  text(start, end) {
    return this.pieces.text(this.ids.subarray(start, end));
  }

  /** Returns the text of a turn's tokens if its message has neither content nor tool calls; otherwise "". */
  textWithoutMessage(block) {
    const { content, tool_calls: calls } = block.message ?? {};
    const isEmpty = !contentText(content).trim() && !(Array.isArray(calls) && calls.length);
    return block.message && isEmpty && block.length && this.hasTexts ? this.text(block.start, block.end) : "";
  }

  blockAt(token) {
    return this.blocks.find((block) => token >= block.start && token < block.end) ?? null;
  }

  /** Assigns each span, reward and incident to its block. */
  #place() {
    for (const span of this.spans) {
      const block = this.#blockOfSpan(span);
      if (!block) continue;
      if (span.kind === "tool") block.calls.push(span);
      else block.spans.push(span);
    }
    for (const item of this.feedback)
      (this.#turnEndingAt(item?.place) ?? this.blocks[0])?.feedback.push(item);
    for (const item of this.incidents)
      (this.turns[(item?.assistant_turn ?? 0) - 1] ?? this.blocks[0])?.incidents.push(item);
    const assistant = this.messages.filter((message) => message.role === "assistant");
    const own = assistant.slice(Math.max(0, assistant.length - this.turns.length));
    this.turns.forEach((block, index) => (block.message = own[index] ?? null));
  }

  #blockOfSpan({ kind, details }) {
    if (kind === "generate") {
      const place = details.num_prompt_tokens;
      return this.turns.find((block) => place >= block.start && place < block.end) ?? null;
    }
    return kind === "tool" ? this.#turnEndingAt(details.place) : null;
  }

  /** Returns the turn whose last token has this index in the response. */
  #turnEndingAt(place) {
    if (typeof place !== "number") return null;
    return this.turns.find((block) => block.end - 1 === this.promptLength + place) ?? null;
  }
}

function listOf(value) {
  return Array.isArray(value) ? value : [];
}

function spanOf([kind, name, start, end, details]) {
  return { kind, name, start, end, details: details && typeof details === "object" ? details : {} };
}

function blocksOf({ meta, ids, mask, promptLength }) {
  const blocks = [];
  const add = (origin, length) => {
    const last = blocks.at(-1);
    const start = last?.end ?? 0;
    const block = last && last.origin === origin && origin === "model" ? last : new Block(origin, start);
    if (block !== last) blocks.push(block);
    block.end = Math.min(start + length, ids.length);
  };
  for (const segment of listOf(meta.segments)) add(segment.origin, segment.num_tokens);
  if (blocks.at(-1)?.end === ids.length) return blocks;
  blocks.length = 0; // without segments, the runs of the mask are used
  if (promptLength) add("prompt", promptLength);
  for (let start = promptLength; start < ids.length;) {
    let end = start;
    while (end < ids.length && mask[end] === mask[start]) end++;
    add(mask[start] ? "model" : "tool", end - start);
    start = end;
  }
  return blocks;
}
