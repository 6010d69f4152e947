// The texts of tokens. Consecutive tokens that each hold a part of a character are decoded together.

const decoder = new TextDecoder("utf-8");
const encoder = new TextEncoder();

export class Pieces {
  #pieces = new Map();

  constructor(ids, pieces) {
    ids?.forEach((id, place) => this.#pieces.set(id, pieces?.[place] ?? null));
  }

  /** Returns the text of one token. Incomplete bytes are written as `⟨E2 80⟩`. */
  of(id) {
    const piece = this.#pieces.get(id);
    if (typeof piece === "string") return piece;
    if (Array.isArray(piece))
      return `⟨${piece.map((byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join(" ")}⟩`;
    return `⟨${id}⟩`;
  }

  /** Returns the text to show at each token. A character of several tokens is shown at the first of them. */
  shown(ids) {
    const texts = new Array(ids.length);
    for (let place = 0; place < ids.length; place++) {
      const piece = this.#pieces.get(ids[place]);
      if (!Array.isArray(piece)) {
        texts[place] = this.of(ids[place]);
        continue;
      }
      const start = place;
      const bytes = [];
      while (place < ids.length && Array.isArray(this.#pieces.get(ids[place])))
        bytes.push(...this.#pieces.get(ids[place++]));
      texts.fill("", start, place);
      texts[start] = decoder.decode(Uint8Array.from(bytes));
      place--;
    }
    return texts;
  }

  text(ids) {
    const bytes = [];
    for (const id of ids) {
      const piece = this.#pieces.get(id);
      bytes.push(Array.isArray(piece) ? Uint8Array.from(piece) : encoder.encode(this.of(id)));
    }
    return decoder.decode(joined(bytes));
  }
}

function joined(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}
