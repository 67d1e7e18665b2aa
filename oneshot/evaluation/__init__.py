"""Quality of models beside a baseline: perplexity, agreement, examples, tasks, sizes and latency."""

from oneshot.evaluation.by_window import load_windows
from oneshot.evaluation.comparison import Evaluation, Evaluations, kept_comparison, print_evaluations, write_json
from oneshot.evaluation.conversation import Conversation, was_cut
from oneshot.evaluation.evaluate import evaluate
from oneshot.evaluation.kinds import kind_of
from oneshot.evaluation.models import load_model, measure_latency
from oneshot.evaluation.scoring import TextScore, perplexity, perplexity_of, relative_score, score_windows
from oneshot.evaluation.tasks import run_tasks, task_manager
