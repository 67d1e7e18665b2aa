"""The model as a stream of hidden states: single layers, what moves through them, and where states are stored."""

from oneshot.stream.check import check_family
from oneshot.stream.further import enter_further
from oneshot.stream.input_squares import InputSquares
from oneshot.stream.layer import DensePass, Layer, outputs_of
from oneshot.stream.layers import LayerBuilder, read_ahead
from oneshot.stream.memory import LentKeys, Memory, memory_of
from oneshot.stream.output_head import OutputHead
from oneshot.stream.placement import EXPERTS_TOGETHER, Placement
from oneshot.stream.routing import Routing
from oneshot.stream.states import States, Step
from oneshot.stream.store import ActivationStore
from oneshot.stream.template import holds_scores
