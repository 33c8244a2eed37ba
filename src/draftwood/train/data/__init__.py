"""Training data: prompts answered by the target, stored in shards and read in batches.

make_data(prepare(settings, folder), loaded)           # make.py: answer prompts, resume an interrupted run
data = TrainingData.open(folder)                       # read.py: examples, splits, batches
data.check_model(target)                               # data must come from the target that is trained for
vocabulary = draft_vocabulary(data, 8192, vocab_size)  # vocabulary.py: tokens of a draft vocabulary
"""

from draftwood.train.data.make import Part, make_data, prepare
from draftwood.train.data.manifest import Manifest
from draftwood.train.data.read import Example, TrainingData
from draftwood.train.data.vocabulary import draft_vocabulary
