// Data source for pages that `agent-loop view` serves.

import { decodePacket } from "./packets.js";

export class LiveSource {
  isLive = true;
  omitted = "";

  state() {
    return this.#json("state");
  }

  config() {
    return this.#json("config");
  }

  metrics(cursor) {
    return this.#json("metrics", { cursor });
  }

  async table(files) {
    return decodePacket(await this.#bytes("table", { files: files.join(",") }));
  }

  async trajectory({ split, step, id }) {
    return decodePacket(await this.#bytes("trajectory", { split, step, id }));
  }

  timeline({ split, step }) {
    return this.#json("timeline", { split, step });
  }

  /** Returns the rows that contain a text, by file. */
  search(text, files) {
    return this.#json("search", { text, files: files.join(",") });
  }

  async #json(name, parameters) {
    return (await this.#reply(name, parameters)).json();
  }

  async #bytes(name, parameters) {
    return (await this.#reply(name, parameters)).arrayBuffer();
  }

  async #reply(name, parameters) {
    const reply = await fetch(`api/${name}?${new URLSearchParams(parameters)}`);
    if (!reply.ok) {
      const body = await reply.json().catch(() => null);
      throw new Error(body?.error ?? `the server returned status ${reply.status}`);
    }
    return reply;
  }
}
