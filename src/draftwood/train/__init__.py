"""Training of draft heads on text that the target generated: one trainer, one loss per method.

The face is light to import: the parts are packages of their own.
"""

from draftwood.train.arguments import NAMES, add_arguments
from draftwood.train.data_settings import DataSettings
