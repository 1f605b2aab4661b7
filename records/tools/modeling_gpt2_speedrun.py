"""The model of train_gpt2.py, or of another script with a RECIPE, for transformers.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

records/tools/export.py copies this file and the script into each folder that it writes. Shapes:
B rows of T tokens, V = vocab_size.
"""

import functools
import warnings

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import can_return_tuple
from transformers.utils.versions import require_version

from .train_gpt2 import RECIPE, changeable_names

require_version("transformers>=4.57.1", "Upgrade with: pip install -U transformers")

# Settings that can define the model, with their defaults. transformers has its own `dtype`.
SETTINGS = {
    name: value
    for name, value in vars(RECIPE.settings()).items()
    if name not in {*changeable_names(RECIPE.settings), "init", "dtype"}
}


class GPT2SpeedrunConfig(PretrainedConfig):
    """The settings that define the model, with the names and defaults of the script."""

    model_type = "gpt2_speedrun"
    attribute_map = {  # noqa: RUF012  # the names that transformers and its users look for
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "sequence_length",
    }

    def __init__(self, **settings):
        super().__init__(**SETTINGS | settings)


def float32_model(config):
    """Return a new model on the CPU, even while transformers asks for another dtype and device.

    In bfloat16, its buffers would be inexact, and on the device "meta", they would have no values.
    """
    args = RECIPE.settings(**{name: getattr(config, name) for name in SETTINGS})
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return RECIPE.build_model(args, torch.float32)
    finally:
        torch.set_default_dtype(default_dtype)


def documents_of(is_token, position_ids):
    """Return the number of each token's document in its row, from 1, and 0 for padding: (B, T).

    is_token: bool (B, T), False for padding. position_ids: None, which is one document per row, or
    (B, T), (1, T) or (T,): 0, 1, 2, ... from the start of each document. Padding does not count,
    and its position_ids do not matter. Raises ValueError for other position_ids.
    """
    if position_ids is None:
        return is_token.long()
    starts = is_token & (position_ids == 0)
    counts = is_token.cumsum(1) - 1  # of the tokens before this one
    counts_at_start = counts.where(starts, 0).cummax(1).values
    if (position_ids != counts - counts_at_start)[is_token].any():
        raise ValueError(
            "position_ids must be 0, 1, 2, ... from the start of each document, without padding"
        )
    return starts.cumsum(1) * is_token


def add_checkpointing(kind):
    """Let transformers ask blocks of this class to recompute activations in the backward pass."""
    forward = kind.forward

    @functools.wraps(forward)
    def checkpointed(self, *inputs, **options):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(forward, self, *inputs, **options)
        return forward(self, *inputs, **options)

    kind.forward = checkpointed
    kind.gradient_checkpointing = False  # transformers sets it, and _gradient_checkpointing_func


class GPT2SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """A model with the embedding wte and the output head lm_head, such as GPT or ModernGPT.

    There is no cache of keys and values, so generation recomputes the whole text for each token.
    """

    config_class = GPT2SpeedrunConfig
    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch
    _tied_weights_keys = {"gpt.lm_head.weight": "gpt.wte.weight"}  # noqa: RUF012  # if tied
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    supports_tp_plan = supports_pp_plan = False  # transformers would ask base_model

    def __init__(self, config):
        super().__init__(config)
        self.gpt = float32_model(config)
        for kind in {type(block) for block in getattr(self.gpt, "h", [])}:
            if not hasattr(kind, "gradient_checkpointing"):
                add_checkpointing(kind)
        self._no_split_modules = [type(self.gpt).__name__]  # all layers are on one device
        for module in self.gpt.modules():
            module.first_buffers = dict(module.named_buffers(recurse=False))
        for parameter in self.gpt.parameters():
            parameter.data = parameter.data.to(torch.get_default_dtype())
        self.post_init()

    def _init_weights(self, module):
        """Initialize what from_pretrained does not load, such as buffers."""
        super()._init_weights(module)
        for name, value in getattr(module, "first_buffers", {}).items():
            getattr(module, name).copy_(value)

    def get_input_embeddings(self):
        return self.gpt.wte

    def set_input_embeddings(self, embeddings):
        self.gpt.wte = embeddings

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def set_output_embeddings(self, head):
        self.gpt.lm_head = head

    def resize_token_embeddings(self, new_num_tokens=None, *arguments, **options):
        """Resize as in transformers. Raises ValueError for a model with several tables."""
        tables = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        if len(tables) > 1 and new_num_tokens is not None:
            fix = "use the tokens of the exported tokenizer"
            raise ValueError(f"the vocabulary of {len(tables)} tables cannot be resized: {fix}")
        return super().resize_token_embeddings(new_num_tokens, *arguments, **options)

    @property
    def base_model(self):
        """A function that returns the last_hidden_state, from which TRL computes the logits."""
        return self.last_hidden_state

    def generate(self, *arguments, **options):
        """Generate as in transformers, but always without a cache."""
        options["use_cache"] = False
        return super().generate(*arguments, **options)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        """Return the arguments of forward. It sees the last sequence_length tokens of a text."""
        limit = self.config.sequence_length
        if input_ids.size(1) > limit:
            kwargs.pop("position_ids", None)  # they would not begin at 0
        if attention_mask is not None:
            attention_mask = attention_mask[:, -limit:]
        kwargs.pop("tokenizer", None)  # only generate uses it, to find stop_strings
        return super().prepare_inputs_for_generation(
            input_ids[:, -limit:], attention_mask=attention_mask, **kwargs
        )

    def compute_by_document(
        self, compute, input_ids, attention_mask=None, position_ids=None, **others
    ):
        """Return compute(tokens), a (B, T, ...) tensor, for documents that do not see each other.

        compute: a function of tokens (B, T). The result is 0 for padding. For the other arguments
        and the errors, see forward.
        """
        others.pop("cache_position", None)  # passed by transformers 4
        if position_ids is not None:  # these arguments also say where documents start
            for name in "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx":
                others.pop(name, None)
        for name, value in others.items():
            if value is not None and value is not False:
                raise TypeError(f"this model has no use for the argument {name}")
        if self.config.tie_word_embeddings and hasattr(self.gpt.wte, "base_layer"):
            # peft warns of the same for lm_head.
            warnings.warn("wte is also lm_head: this adapter cannot be merged", stacklevel=2)
        tokens, limit = input_ids.size(1), self.config.sequence_length
        if tokens > limit:
            raise ValueError(f"{tokens} tokens are more than sequence_length={limit}")
        # Copies made by nn.DataParallel have no parameters. They keep the model's dtype.
        self.gpt.dtype = next((p.dtype for p in self.parameters()), self.gpt.dtype)
        if attention_mask is None and position_ids is None:
            return compute(input_ids)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if getattr(attention_mask, "shape", None) != input_ids.shape:
            shape = tuple(input_ids.shape)
            raise ValueError(f"attention_mask must have the shape {shape}, with 0 for padding")
        documents = documents_of(attention_mask.bool(), position_ids)
        if (documents.diff(dim=1) <= 0).all():  # at most one document per row, from its start on
            results = compute(input_ids)
            results[documents == 0] = 0.0
            return results
        results = None
        for row, numbers in enumerate(documents):
            for number in numbers[numbers > 0].unique():
                places = numbers == number
                result = compute(input_ids[row, places][None])[0]
                if results is None:
                    results = result.new_zeros(*input_ids.shape, result.size(-1))
                results[row, places] = result
        return results

    def last_hidden_state(self, input_ids, **arguments):
        """Return the input of the head, (B, T, C), as a BaseModelOutput. Arguments: see forward.

        Raises ValueError if the script's model does more with the head's output than to limit it
        by final_logit_softcapping.
        """

        def compute(tokens):
            hidden = []

            def keep(head, inputs):
                hidden.append(inputs[0])
                return inputs[0][:, -1:]  # spares the logits of the other positions

            with self.gpt.lm_head.register_forward_pre_hook(keep):
                logits = self.gpt(tokens)
            expected = self.gpt.lm_head(hidden[0][:, -1:]).float()
            if softcap := getattr(self.config, "final_logit_softcapping", None):
                expected = softcap * (expected / softcap).tanh()
            if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise ValueError(
                    "the logits of this model are not those of its head: "
                    "use a trainer that calls it with labels, such as transformers.Trainer"
                )
            return hidden[0]

        arguments.pop("use_cache", None)
        return BaseModelOutput(self.compute_by_document(compute, input_ids, **arguments))

    @can_return_tuple  # handles return_dict=False
    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        labels=None,
        logits_to_keep=0,
        num_items_in_batch=None,
        use_cache=False,
        **others,
    ):
        """Return CausalLMOutput: float32 logits (B, T, V), and the loss if there are labels.

        input_ids: (B, T) int64. attention_mask: (B, T), 0 for padding. position_ids: see
        documents_of; several documents in a row do not see each other. Rows with several documents
        or with padding on the left are computed one document at a time. labels: (B, T), equal to
        input_ids, or -100 to ignore a token; num_items_in_batch: what the loss is divided by,
        default: the number of labels. logits_to_keep: return only the logits of this many last
        positions, or of these positions; 0 returns all. use_cache has no effect. Raises ValueError
        if T exceeds sequence_length, and for a wrong shape or wrong positions; TypeError for
        arguments that it would have to ignore, such as inputs_embeds.
        """
        logits = self.compute_by_document(
            self.gpt, input_ids, attention_mask, position_ids, **others
        )
        if not isinstance(logits_to_keep, torch.Tensor):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutput(loss=loss, logits=logits)
