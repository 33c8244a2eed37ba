"""Training data: prompts answered by the target, stored in shards and read in batches.

make_data(prepare(settings, folder), loaded)           # make.py: answer prompts, resume an interrupted run
data = TrainingData.open(folder)                       # read.py: examples, splits, batches
data.check_model(target)                               # data must come from the target that is trained for
vocabulary = draft_vocabulary(data, 8192, vocab_size)  # vocabulary.py: tokens of a draft vocabulary
"""

from draftwood.train.base import Example
from draftwood.train.data.make import make_data, prepare
from draftwood.train.data.manifest import Manifest
from draftwood.train.data.read import TrainingData
from draftwood.train.data.vocabulary import draft_vocabulary

__all__ = ["Example", "Manifest", "TrainingData", "draft_vocabulary", "make_data", "prepare"]
