"""Sources of guesses: everything that suggests next tokens without running a model."""

from draftwood.sources.adaptive import AdaptiveNgrams
from draftwood.sources.context import CompiledContextMatch, ContextMatch, Match, new_context
from draftwood.sources.datastore import Datastore, DatastoreInfo, build_datastore, tokenizer_fingerprint
from draftwood.sources.hints import DatastoreHints, DraftedHints, PlaceHints, PositionHints, SuccessorHints
from draftwood.sources.lookahead import JacobiWindow, NgramPool
from draftwood.sources.ngrams import NgramTables
from draftwood.sources.rowtable import IdRows, RowTable, ScoreRows
from draftwood.sources.successors import build_successors, load_successors, save_successors
from draftwood.sources.suffix import CorpusAutomaton, SuffixAutomaton, SuffixSource, load_corpus
from draftwood.sources.transitions import SuccessorArrays, TransitionTable
