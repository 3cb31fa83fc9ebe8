r"""Chunked loss: the logits of 256 tokens at a time, and of trained tokens only.

Saves    logits, their fp32 copy and their gradient: N V elements -> 256 V           [bytes]
Costs    no FLOPs, because the gradient is computed in the forward pass, while the logits still exist. A head in another
         dtype is cast once per micro-batch: 2 V D bytes for a while after the usual 4-bit preparation, none after the
         lean one
Claim    exact within rounding
Needs    a frozen head (peft = lora), because only the gradient of the hidden states is kept, and none of the head
Breaks   an adapted or trained head; heads that scale or cap their logits (Gemma 2, Cohere)
Sources  Wijmans et al. 2024, arXiv:2411.09009, sec. 4 (never hold all logits); Liger-Kernel (arXiv:2410.10989,
         sec. 3.2) makes the gradient in the forward pass, as here
Ours     one autograd.Function in plain operations, with the loss in fp32: the reference is also the production version.
         No fused kernel. torch's linear_cross_entropy (2.13) rounds a bf16 loss to bf16 and computes masked tokens too

Shapes: N trained tokens, D hidden width, V vocabulary, C = 256 tokens per chunk.
"""

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.bill.operation import TOKENS_PER_CHUNK
from cria_tricks.common.errors import BadInput

REFERENCE = ("_ChunkedCrossEntropy", "_one_chunk")
PLAIN = """
import torch
import torch.nn.functional as F
from transformers import Trainer


class ChunkedTrainer(Trainer):
    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        if hasattr(model, "get_base_model"):  # peft wraps it; take the model inside
            model = model.get_base_model()
        labels = inputs["labels"][:, 1:]
        inputs = {name: x for name, x in inputs.items() if name != "labels"}
        # The Trainer's own autocast is around model.forward, which is not called here.
        with self.accelerator.autocast():
            hidden = model.base_model(**inputs).last_hidden_state[:, :-1]
            hidden, labels = hidden[labels != -100], labels[labels != -100]
            losses = [
                torch.utils.checkpoint.checkpoint(
                    lambda h, y: F.cross_entropy(
                        model.lm_head(h).float(), y, reduction="sum"
                    ),
                    *chunk,
                    use_reentrant=False,
                )
                for chunk in zip(hidden.split(256), labels.split(256))
            ]
        loss = sum(losses) / (num_items_in_batch or len(labels))
        return (loss, {}) if return_outputs else loss


# model, arguments, rows and collate: as for a plain Trainer
trainer = ChunkedTrainer(model, arguments, train_dataset=rows, data_collator=collate)
"""
# Probabilities below 6e-8 would round to zero in fp16. So in fp16 the gradient of the logits is multiplied by this
# factor; after the product with the head it is divided by it again, in fp32.
_FP16_LIFT = 1024.0


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the loss and the gradient of the hidden states together, so that only this gradient (N, D) is saved."""

    @staticmethod
    def forward(ctx, hidden_ND, head_VD, labels_N, chunk):
        grad_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, len(labels_N), chunk):
            here = slice(start, start + chunk)
            grad_CD = None if grad_ND is None else grad_ND[here]
            loss += _one_chunk(hidden_ND[here], head_VD, labels_N[here, None], grad_CD)
        ctx.save_for_backward(grad_ND)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (grad_ND,) = ctx.saved_tensors
        return grad * grad_ND, None, None, None


def _one_chunk(hidden_CD, head_VD, labels_C1, grad_CD):
    # A function of its own, so that these logits are freed before those of the next chunk are made.
    logits_CV = (hidden_CD @ head_VD.T).float()
    logsumexp_C1 = logits_CV.logsumexp(-1, keepdim=True)
    loss = (logsumexp_C1 - logits_CV.gather(1, labels_C1)).sum()
    if grad_CD is not None:  # of the logits: softmax - one-hot, made in their memory
        lift = _FP16_LIFT if hidden_CD.dtype == torch.float16 else 1.0
        grad_CV = logits_CV.sub_(logsumexp_C1).exp_()
        grad_CV.scatter_add_(1, labels_C1, -torch.ones_like(logsumexp_C1))
        lifted_CD = grad_CV.mul_(lift).to(hidden_CD.dtype) @ head_VD
        grad_CD.copy_(lifted_CD if lift == 1.0 else lifted_CD.float() / lift)
    return loss


def chunked_cross_entropy(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, labels_N: torch.Tensor, chunk: int = TOKENS_PER_CHUNK
) -> torch.Tensor:
    """Sum the cross-entropies of ``softmax(hidden @ head.T)`` at the labels.

    Args:
        hidden_ND: last hidden states, shape (N, D), any float dtype; only these get a gradient.
        head_VD: output matrix, shape (V, D), frozen.
        labels_N: token ids, shape (N,), none of them masked (-100).
        chunk: tokens whose logits exist at one time.

    Returns:
        The sum over the N tokens, fp32, no dimensions. 0 when N is 0.

    Raises:
        BadInput: if the head trains, or a label is masked.
    """
    if head_VD.requires_grad:
        raise BadInput("the chunked loss has no gradient for the head: freeze the head, or take the full loss")
    # A GPU would end the process at such an index. The labels of a dry run, of another type, have no values.
    if type(labels_N) is torch.Tensor and (labels_N < 0).any():
        raise BadInput("the chunked loss takes trained tokens alone: leave out each hidden state whose label is -100")
    device = hidden_ND.device.type
    if not torch.is_grad_enabled():
        hidden_ND = hidden_ND.detach()  # evaluation: no gradient is made
    if torch.is_autocast_enabled(device):  # cast once, not once a chunk
        dtype = torch.get_autocast_dtype(device)
        hidden_ND = hidden_ND.to(dtype)
        head_VD = head_VD.to(dtype)
    else:
        hidden_ND = hidden_ND.to(head_VD.dtype)
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden_ND, head_VD, labels_N, chunk)
