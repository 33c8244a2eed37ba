"""Training data: prompts that the target itself answers, kept in shards on disk, and read back in batches.

make_data(prepare(settings, folder), loaded)           # make.py: answers prompts, goes on where it was stopped
data = TrainingData.open(folder)                       # read.py: examples, splits, batches
data.check_model(target)                               # the target that trains is the one that wrote the data
vocabulary = draft_vocabulary(data, 8192, vocab_size)  # vocabulary.py: the tokens that a small head should know
"""

from draftwood.train.data.make import make_data, prepare
from draftwood.train.data.manifest import Manifest
from draftwood.train.data.read import TrainingData
from draftwood.train.data.settings import DataSettings
from draftwood.train.data.vocabulary import draft_vocabulary

__all__ = ["DataSettings", "Manifest", "TrainingData", "draft_vocabulary", "make_data", "prepare"]
