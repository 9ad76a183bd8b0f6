/* Formulas in LaTeX's notation to MathML, which browsers draw themselves: the part of the notation that answers use. */

import { escapeHtml } from "./escape";
import { ACCENTS, BLACKBOARD, FUNCTIONS, LARGE_OPERATORS, LETTERS, SYMBOLS, WIDTHS, WITH_LIMITS } from "./math_symbols";

/** Longer formulas are shown as they are. */
const LIMIT = 5_000;
const DEPTH = 50;

class Unknown extends Error {}

/** MathML of a formula, or null where it uses what is not known here. `display`: in a line of its own. */
export function toMathML(source: string, display: boolean): string | null {
  if (source.length > LIMIT) return null;
  try {
    return `<math display="${display ? "block" : "inline"}">${new Parser(source, display).all()}</math>`;
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

const ENVIRONMENTS: { [name: string]: [open: string, close: string, align: string] } = {
  matrix: ["", "", "center"],
  pmatrix: ["(", ")", "center"],
  bmatrix: ["[", "]", "center"],
  Bmatrix: ["{", "}", "center"],
  vmatrix: ["|", "|", "center"],
  cases: ["{", "", "left"],
  aligned: ["", "", "right left"],
  align: ["", "", "right left"],
  "align*": ["", "", "right left"],
  gathered: ["", "", "center"],
  array: ["", "", "center"],
};

/** Commands of which the argument is text. */
const TEXTS = new Set(["text", "textbf", "textit", "textrm", "mbox", "texttt"]);
/** Commands that change only how their argument looks, or nothing. */
const STYLES = new Set(["mathbf", "boldsymbol", "mathcal", "mathit", "mathsf", "mathfrak", "mathscr", "boxed", "bm"]);
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "nonumber"]);

class Parser {
  private readonly tokens: string[];
  private at = 0;
  private depth = 0;

  constructor(
    source: string,
    private readonly display: boolean,
  ) {
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\[\s\S]|\d+(?:[.,]\d+)*|\s+|[\s\S]/gu) ?? [];
  }

  all(): string {
    const result = this.row(() => false);
    if (this.at < this.tokens.length) throw new Unknown();
    return result;
  }

  private skipSpace(): void {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at += 1;
  }

  /** What follows up to a token for which `end` is true, which is left. */
  private row(end: (token: string) => boolean): string {
    this.depth += 1;
    if (this.depth > DEPTH) throw new Unknown();
    const parts: string[] = [];
    for (;;) {
      this.skipSpace();
      const token = this.tokens[this.at];
      if (token === undefined || end(token)) break;
      if (token === "}" || token === "&" || token === "\\\\" || token === "\\right" || token === "\\end") throw new Unknown();
      parts.push(this.scripted());
    }
    this.depth -= 1;
    return parts.length === 1 ? (parts[0] as string) : `<mrow>${parts.join("")}</mrow>`;
  }

  /** An item with what is above and below it. */
  private scripted(): string {
    const token = this.tokens[this.at] as string;
    const base = token === "^" || token === "_" ? "<mrow></mrow>" : this.item();
    const name = token.slice(1);
    const limits = this.display && token[0] === "\\" && (WITH_LIMITS.has(name) || (LARGE_OPERATORS.has(name) && !name.endsWith("int")));
    let lower: string | null = null;
    let upper: string | null = null;
    for (;;) {
      this.skipSpace();
      const next = this.tokens[this.at];
      if (next === "_" && lower === null) {
        this.at += 1;
        lower = this.argument();
      } else if (next === "^" && upper === null) {
        this.at += 1;
        upper = this.argument();
      } else if (next === "'" && upper === null) {
        let count = 0;
        while (this.tokens[this.at] === "'") {
          count += 1;
          this.at += 1;
        }
        upper = `<mo>${"′".repeat(count)}</mo>`;
      } else if (next === "\\limits" || next === "\\nolimits") this.at += 1;
      else break;
    }
    const [below, above, both] = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (lower !== null && upper !== null) return `<${both}>${base}${lower}${upper}</${both}>`;
    if (lower !== null) return `<${below}>${base}${lower}</${below}>`;
    return upper !== null ? `<${above}>${base}${upper}</${above}>` : base;
  }

  /** A group in braces, or one item. */
  private argument(): string {
    this.skipSpace();
    const token = this.tokens[this.at];
    if (token !== undefined && /^\d\d/.test(token)) {
      // x^23 is x^2 3
      this.tokens.splice(this.at, 1, token[0] as string, token.slice(1));
    }
    return this.item();
  }

  private item(): string {
    const token = this.tokens[this.at];
    if (token === undefined) throw new Unknown();
    this.at += 1;
    if (token === "{") {
      const inner = this.row((next) => next === "}");
      this.expect("}");
      return `<mrow>${inner}</mrow>`;
    }
    if (/^\d/.test(token)) return `<mn>${token}</mn>`;
    if (/^\p{L}/u.test(token)) return `<mi>${escapeHtml(token)}</mi>`;
    if (token === "~") return `<mspace width="0.333em"></mspace>`;
    if (token[0] !== "\\") return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
    return this.command(token.slice(1));
  }

  private command(name: string): string {
    const letter = LETTERS.get(name);
    if (letter) return `<mi>${letter}</mi>`;
    const symbol = SYMBOLS.get(name) ?? LARGE_OPERATORS.get(name);
    if (symbol) return operator(symbol);
    if (FUNCTIONS.has(name)) return `<mi>${name}</mi>`;
    const width = WIDTHS.get(name);
    if (width) return `<mspace width="${width}"></mspace>`;
    const accent = ACCENTS.get(name);
    if (accent) return `<mover accent="true">${this.argument()}<mo stretchy="${name.length > 5}">${accent}</mo></mover>`;
    if (TEXTS.has(name)) return `<mtext>${escapeHtml(this.raw())}</mtext>`;
    if (name === "mathrm" || name === "operatorname" || name === "operatorname*") return `<mi mathvariant="normal">${escapeHtml(this.raw())}</mi>`;
    if (name === "mathbb") return `<mi>${[...this.raw()].map((one) => BLACKBOARD.get(one) ?? escapeHtml(one)).join("")}</mi>`;
    if (STYLES.has(name)) return this.argument();
    if (IGNORED.has(name) || name === "!") return "<mrow></mrow>";
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return `<mfrac>${this.argument()}${this.argument()}</mfrac>`;
      case "binom":
        return `<mrow>${operator("(")}<mfrac linethickness="0">${this.argument()}${this.argument()}</mfrac>${operator(")")}</mrow>`;
      case "underline":
        return `<munder>${this.argument()}<mo>_</mo></munder>`;
      case "underbrace":
        return `<munder>${this.argument()}<mo>⏟</mo></munder>`;
      case "not":
        return `<mrow>${this.argument()}<mo≯</mo></mrow>`;
      case "pmod":
        return `<mrow><mspace width="0.5em"></mspace>${operator("(")}<mi>mod</mi><mspace width="0.25em"></mspace>${this.argument()}${operator(")")}</mrow>`;
      case "bmod":
        return `<mspace width="0.25em"></mspace><mi>mod</mi><mspace width="0.25em"></mspace>`;
      case "overset":
      case "stackrel": {
        const over = this.argument();
        return `<mover>${this.argument()}${over}</mover>`;
      }
      case "underset": {
        const under = this.argument();
        return `<munder>${this.argument()}${under}</munder>`;
      }
      case "sqrt":
        return this.root();
      case "left":
        return this.fenced();
      case "begin":
        return this.environment();
      default:
        throw new Unknown();
    }
  }

  private root(): string {
    this.skipSpace();
    if (this.tokens[this.at] !== "[") return `<msqrt>${this.argument()}</msqrt>`;
    this.at += 1;
    const index = this.row((token) => token === "]");
    this.expect("]");
    return `<mroot>${this.argument()}${index}</mroot>`;
  }

  private fenced(): string {
    const open = this.delimiter();
    const inner = this.row((token) => token === "\\right");
    this.expect("\\right");
    return `<mrow>${open}${inner}${this.delimiter()}</mrow>`;
  }

  private delimiter(): string {
    this.skipSpace();
    const token = this.tokens[this.at];
    if (token === undefined) throw new Unknown();
    this.at += 1;
    if (token === ".") return "";
    return `<mo fence="true" stretchy="true">${escapeHtml(token[0] === "\\" ? (SYMBOLS.get(token.slice(1)) ?? "") : token)}</mo>`;
  }

  private environment(): string {
    const name = this.raw();
    const form = ENVIRONMENTS[name];
    if (!form) throw new Unknown();
    if (name === "array") this.raw(); // the columns
    const rows: string[][] = [[]];
    for (;;) {
      rows.at(-1)?.push(this.row((token) => token === "&" || token === "\\\\" || token === "\\end"));
      const token = this.tokens[this.at];
      this.at += 1;
      if (token === "\\\\") rows.push([]);
      else if (token === "\\end") break;
      else if (token !== "&") throw new Unknown();
    }
    if (this.raw() !== name) throw new Unknown();
    const [open, close, align] = form;
    const last = rows.at(-1);
    if (last?.length === 1 && last[0] === "<mrow></mrow>") rows.pop();
    const body = rows.map((cells) => `<mtr>${cells.map((cell) => `<mtd>${cell}</mtd>`).join("")}</mtr>`).join("");
    const fence = (sign: string) => (sign ? `<mo fence="true" stretchy="true">${sign}</mo>` : "");
    return `<mrow>${fence(open)}<mtable columnalign="${align}">${body}</mtable>${fence(close)}</mrow>`;
  }

  /** The characters of a group in braces. */
  private raw(): string {
    this.skipSpace();
    this.expect("{");
    let text = "";
    for (let open = 1; ; ) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new Unknown();
      this.at += 1;
      if (token === "{") open += 1;
      if (token === "}") open -= 1;
      if (open === 0) return text;
      text += token[0] === "\\" && token.length === 2 ? token[1] : token;
    }
  }

  private expect(token: string): void {
    if (this.tokens[this.at] !== token) throw new Unknown();
    this.at += 1;
  }
}

/** Brackets grow with what is between them only where \\left and \\right say so. */
function operator(sign: string): string {
  return /^[()[\]{}|‖⟨⟩⌊⌋⌈⌉/]$/.test(sign) ? `<mo stretchy="false">${escapeHtml(sign)}</mo>` : `<mo>${escapeHtml(sign)}</mo>`;
}
