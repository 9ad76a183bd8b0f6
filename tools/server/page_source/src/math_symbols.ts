/* What LaTeX commands without arguments stand for. */

const GREEK =
  "alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ pi:π " +
  "rho:ρ sigma:σ tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Phi:Φ Psi:Ψ " +
  "Omega:Ω ell:ℓ hbar:ℏ infty:∞ partial:∂ nabla:∇ emptyset:∅ varnothing:∅ Re:ℜ Im:ℑ aleph:ℵ imath:ı jmath:ȷ";

const OPERATORS =
  "cdot:⋅ times:× div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ cap:∩ cup:∪ setminus:∖ land:∧ wedge:∧ lor:∨ vee:∨ " +
  "neg:¬ lnot:¬ le:≤ leq:≤ leqslant:≤ ge:≥ geq:≥ geqslant:≥ ne:≠ neq:≠ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝ ll:≪ gg:≫ " +
  "in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ forall:∀ exists:∃ nexists:∄ to:→ rightarrow:→ longrightarrow:⟶ gets:← " +
  "leftarrow:← leftrightarrow:↔ Rightarrow:⇒ implies:⟹ Longrightarrow:⟹ Leftarrow:⇐ Leftrightarrow:⇔ iff:⟺ mapsto:↦ uparrow:↑ downarrow:↓ " +
  "ldots:… dots:… cdots:⋯ vdots:⋮ ddots:⋱ mid:∣ parallel:∥ perp:⊥ angle:∠ langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lvert:| " +
  "rvert:| lVert:‖ rVert:‖ Vert:‖ vert:| colon:: therefore:∴ because:∵ prime:′ degree:° checkmark:✓ square:□ triangle:△ backslash:\\ " +
  "models:⊨ vdash:⊢ top:⊤ bot:⊥ {:{ }:} |:‖ %:% $:$ #:# &:& _:_";

const LARGE = "sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ iiint:∭ oint:∮ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀";

const NAMED =
  "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker deg gcd lcm arg max min sup inf lim limsup liminf " +
  "argmax argmin softmax Pr hom mod";

export const LETTERS = table(GREEK);
export const SYMBOLS = table(OPERATORS);
/** Operators that are large in displayed formulas, and have limits. */
export const LARGE_OPERATORS = table(LARGE);
/** Functions that are written upright. */
export const FUNCTIONS = new Set(NAMED.split(" "));
/** Names of which an index is written below in displayed formulas. */
export const WITH_LIMITS = new Set("max min sup inf lim limsup liminf argmax argmin det gcd Pr".split(" "));
export const WIDTHS = new Map(
  Object.entries({ ",": "0.167em", ":": "0.222em", ";": "0.278em", " ": "0.25em", thinspace: "0.167em", quad: "1em", qquad: "2em" }),
);
/** Marks over what follows. */
export const ACCENTS = table("hat:^ widehat:^ bar:¯ overline:¯ tilde:~ widetilde:~ vec:→ overrightarrow:→ dot:˙ ddot:¨ overbrace:⏞");
/** Values of `mathvariant`: only "normal" exists in MathML Core, letters of the others are characters of their own. */
export const BLACKBOARD = new Map([..."CHNPQRZ"].map((letter, index) => [letter, [..."ℂℍℕℙℚℝℤ"][index] as string]));

function table(text: string): Map<string, string> {
  return new Map(text.split(" ").map(split));
}

/** Divides at the last colon that something follows. */
function split(entry: string): [string, string] {
  const at = entry.lastIndexOf(":", entry.length - 2);
  return [entry.slice(0, at), entry.slice(at + 1)];
}
