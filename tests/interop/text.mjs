// Text in and out of tokens, by a Hugging Face folder's tokenizer.json: byte-level BPE, as GPT-2 has it.
import { readFileSync } from "node:fs";
import { join } from "node:path";

const WORDS = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

/** Each byte as a character that can be seen: those that can already stand for themselves. */
function byteCharacters() {
  const characters = [];
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const seen = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    characters.push(String.fromCodePoint(seen ? byte : next++));
  }
  return characters;
}

export class Tokenizer {
  constructor(folder) {
    const { model, pre_tokenizer: pre, added_tokens: added } = readJson(folder, "tokenizer.json");
    if (model.type !== "BPE" || pre?.type !== "ByteLevel") throw new Error(`${folder}: not a byte-level BPE tokenizer`);
    this.idOf = new Map(Object.entries(model.vocab));
    this.textOf = new Map(Object.entries(model.vocab).map(([text, id]) => [id, text]));
    this.special = new Set(added.filter((token) => token.special).map(({ id }) => id));
    this.rankOf = new Map(model.merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(" ") : pair, rank]));
    this.characters = byteCharacters();
    this.byteOf = new Map(this.characters.map((character, byte) => [character, byte]));
    const { eos_token_id: ends } = readJson(folder, "generation_config.json");
    this.stops = new Set([ends].flat());
  }

  encode(text) {
    return [...text.matchAll(WORDS)].flatMap(([word]) => this.merge(word).map((piece) => this.idOf.get(piece)));
  }

  /** The pair that training merged first is merged first. */
  merge(word) {
    const pieces = [...Buffer.from(word, "utf8")].map((byte) => this.characters[byte]);
    for (;;) {
      let best = Infinity;
      let at = -1;
      for (let place = 0; place + 1 < pieces.length; place++) {
        const rank = this.rankOf.get(`${pieces[place]} ${pieces[place + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, place];
      }
      if (at < 0) return pieces;
      pieces.splice(at, 2, pieces[at] + pieces[at + 1]);
    }
  }

  decode(tokens) {
    const text = tokens.filter((token) => !this.special.has(token)).map((token) => this.textOf.get(token) ?? "").join("");
    return Buffer.from([...text].map((character) => this.byteOf.get(character))).toString("utf8");
  }
}

function readJson(folder, name) {
  return JSON.parse(readFileSync(join(folder, name), "utf8"));
}
