// Evaluates the values of workflow files, with their `${{ }}`, by GitHub's own package.

import { data, Evaluator, Lexer, Parser } from "@actions/expressions";
import { truthy } from "@actions/expressions/result";
import { isBasicExpression, isMapping, isSequence } from "@actions/workflow-parser";

/** An error for which GitHub would fail this job or refuse this workflow. */
export class JobError extends Error {}

/** Converts contexts for the evaluator. Expressions can use no other contexts. */
export function makeContexts(plain) {
  return Object.fromEntries(
    Object.entries(plain).map(([name, value]) => [name, toData(value ?? null)]),
  );
}

/**
 * Evaluates `expression`, the text between `${{` and `}}`, to data of the package.
 *
 * functions: the functions that the package lacks, such as success().
 */
function evaluate(expression, contexts, functions) {
  try {
    const { tokens } = new Lexer(expression).lex();
    const tree = new Parser(tokens, Object.keys(contexts), functions).parse();
    const values = new data.Dictionary(
      ...Object.entries(contexts).map(([key, value]) => ({ key, value })),
    );
    const named = new Map(functions.map((one) => [one.name.toLowerCase(), one]));
    return new Evaluator(tree, values, named).evaluate();
  } catch (error) {
    throw new JobError(`\${{ ${expression} }}: ${error.message}`, { cause: error });
  }
}

/** Evaluates an `if`. */
export function isTrue(expression, contexts, functions) {
  return truthy(evaluate(expression, contexts, functions));
}

/** Returns the value of a token, with all its expressions evaluated. */
export function resolve(token, contexts) {
  if (token === undefined) {
    return undefined;
  }
  if (isBasicExpression(token)) {
    return toPlain(evaluate(token.expression, contexts, []));
  }
  if (token.isExpression) {
    throw new JobError(`${token.toString()} is not supported here`);
  }
  if (isSequence(token)) {
    return [...token].map((item) => resolve(item, contexts));
  }
  if (isMapping(token)) {
    return Object.fromEntries(
      [...token].map(({ key, value }) => [
        toText(resolve(key, contexts)),
        resolve(value, contexts),
      ]),
    );
  }
  return token.value ?? null;
}

/** Converts a scalar to a string, as GitHub does. */
export function toText(value) {
  if (value !== null && typeof value === "object") {
    throw new JobError(`a text is expected, and there is ${JSON.stringify(value)}`);
  }
  return toData(value ?? null).coerceString();
}

function toData(plain) {
  return JSON.parse(JSON.stringify(plain), data.reviver);
}

function toPlain(value) {
  return JSON.parse(JSON.stringify(value, data.replacer));
}
