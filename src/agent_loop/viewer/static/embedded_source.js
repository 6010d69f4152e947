// Data source for pages of `agent-loop view --export`, which embed their data.

import { decodePacket } from "./packets.js";
import { contentText } from "./format.js";

export class EmbeddedSource {
  isLive = false;
  #parts = new Map();
  #head;

  constructor(head) {
    this.#head = head;
    this.omitted = head.omitted;
  }

  /** Returns the source; null if the page has no embedded data. */
  static async find() {
    if (!document.getElementById("data-head")) return null;
    const head = JSON.parse(new TextDecoder().decode(await unpacked("data-head")));
    return new EmbeddedSource(head);
  }

  async state() {
    return this.#head.state;
  }

  async config() {
    return this.#head.config;
  }

  async metrics(cursor) {
    return cursor ? { ...this.#head.metrics, lines: [], is_new: false } : this.#head.metrics;
  }

  async table() {
    return decodePacket(await this.#part("data-table"));
  }

  async trajectory({ split, step, id }) {
    const part = this.#head.trajectories[`${split} ${step} ${id}`];
    if (!part)
      throw new Error(`this file does not contain ${id} of ${split} step ${step} in full. ${this.omitted}`);
    return decodePacket(await this.#part(part.part));
  }

  async timeline({ split, step }) {
    const part = this.#head.timelines[`${split} ${step}`];
    if (!part) throw new Error(`this file does not contain the times of ${split} step ${step}. ${this.omitted}`);
    return JSON.parse(new TextDecoder().decode(await this.#part(part)));
  }

  async search(text, files) {
    const found = {};
    const wanted = text.toLowerCase();
    for (const { part, file, row } of Object.values(this.#head.trajectories)) {
      if (!files.includes(file)) continue;
      const { meta } = decodePacket(await this.#part(part));
      if (textsOf(meta).some((words) => words.toLowerCase().includes(wanted))) (found[file] ??= []).push(row);
    }
    return found;
  }

  async #part(name) {
    if (!this.#parts.has(name)) this.#parts.set(name, unpacked(name));
    return this.#parts.get(name);
  }
}

function* textsIn(meta) {
  for (const message of Array.isArray(meta.messages) ? meta.messages : []) {
    yield contentText(message.content);
    if (message.tool_calls) yield JSON.stringify(message.tool_calls);
  }
  yield `${meta.answer ?? ""}\n${meta.failure ?? ""}\n${meta.failure_traceback ?? ""}`;
  yield JSON.stringify([meta.incidents, meta.feedback, meta.row, meta.reward_extra]);
}

const textsOf = (meta) => [...textsIn(meta)];

async function unpacked(name) {
  const text = document.getElementById(name).textContent;
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
