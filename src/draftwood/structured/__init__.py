"""Output that matches a JSON schema, a regular expression or a grammar: compiled matchers, and trees that obey them."""

from draftwood.structured.compiler import JSON_LAYOUT, StructureCompiler
from draftwood.structured.matcher import Structure, StructureMatcher
from draftwood.structured.trees import GRAMMAR_SOURCE, constrain
