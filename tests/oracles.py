"""Every loss as one would write it with all logits in memory. For tests only; any dtype up to float64."""

import functools
import math

import torch
import torch.nn.functional as F


def reduced(loss, reduction):
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def clip_dense(image, text, scale, reduction="mean"):
    logits = scale * image @ text.T
    answer = torch.arange(len(image), device=image.device)
    rows = F.cross_entropy(logits, answer, reduction="none")
    cols = F.cross_entropy(logits.T, answer, reduction="none")
    return reduced((rows + cols) / 2, reduction)


def siglip_dense(image, text, scale, bias, reduction="mean"):
    logits = scale * image @ text.T + bias
    sign = 2 * torch.eye(len(image), dtype=logits.dtype, device=image.device) - 1
    return reduced(-F.logsigmoid(sign * logits).sum(1), reduction)


def nt_xent_dense(z, temperature=0.5, reduction="mean", decoupled=False, queue=None):
    n = len(z)
    itself = torch.eye(n, dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    if queue is not None:
        logits = torch.cat([logits, z @ queue.T / temperature], 1)
    answer = (torch.arange(n, device=z.device) + n // 2) % n
    if decoupled:
        return reduced(decoupled_dense(logits, answer), reduction)
    return F.cross_entropy(logits, answer, reduction=reduction)


def decoupled_dense(logits, answer):
    """The log-sum-exp of all scores but the answer's, minus the answer's; 0 without other scores."""
    others = logits.scatter(1, answer[:, None], -torch.inf)
    alone = others.amax(1) == -torch.inf
    loss = others.masked_fill(alone[:, None], 0.0).logsumexp(1) - logits.gather(1, answer[:, None])[:, 0]
    return loss.masked_fill(alone, 0.0)


def supcon_dense(z, labels, temperature=0.07, reduction="mean", queue=None, queue_labels=None):
    columns = z if queue is None else torch.cat([z, queue])
    column_labels = labels if queue is None else torch.cat([labels, queue_labels])
    itself = torch.eye(len(z), len(columns), dtype=torch.bool, device=z.device)
    logits = (z @ columns.T / temperature).masked_fill(itself, -torch.inf)
    positive = (labels[:, None] == column_labels[None, :]) & ~itself
    log_prob = (logits - torch.logsumexp(logits, 1, keepdim=True)).masked_fill(~positive, 0.0)
    count = positive.sum(1)
    loss = torch.where(count > 0, -log_prob.sum(1) / count.clamp(min=1), 0.0)
    return reduced(loss, reduction)


def info_nce_dense(
    query,
    key,
    negatives=None,
    temperature=0.07,
    in_batch=True,
    symmetric=False,
    query_ids=None,
    key_ids=None,
    negative_mask=None,
    hardness=0.0,
    hardness_mode="all_negatives",
    left_out=(None, None, None),
    decoupled=False,
    log_q=None,
    reduction="mean",
):
    n = len(query)
    eye = torch.eye(n, dtype=torch.bool, device=query.device)
    own = (query * key).sum(1, keepdim=True) / temperature
    plain = query @ key.T
    columns = (plain / temperature).T
    in_batch_hardness = 0.0 if hardness_mode == "hard_negatives" else hardness
    hard_hardness = 0.0 if hardness_mode == "in_batch_negatives" else hardness
    batch = plain / temperature + in_batch_hardness * plain.detach().masked_fill(eye, 0.0)
    if query_ids is not None:
        same = (query_ids[:, None] == key_ids[None, :n]) & ~eye
        batch, columns = batch.masked_fill(same, -torch.inf), columns.masked_fill(same.T, -torch.inf)
    out_of_batch, out_of_columns, out_of_negatives = left_out  # what a guide leaves out
    if out_of_batch is not None:
        batch, columns = batch.masked_fill(out_of_batch, -torch.inf), columns.masked_fill(out_of_columns, -torch.inf)
    if log_q is not None:
        own, batch = own - log_q[:n, None], batch - log_q[:n]
    parts = [batch] if in_batch else [own]
    if negatives is not None and negatives.dim() == 2:
        more = query @ negatives.T
        more = more / temperature + hard_hardness * more.detach()
        if query_ids is not None and len(key_ids) > n:
            more = more.masked_fill(query_ids[:, None] == key_ids[None, n:], -torch.inf)
        if log_q is not None:
            more = more - log_q[n:]
        if negative_mask is not None:
            more = more.masked_fill(~negative_mask[None, :], -torch.inf)
        parts.append(more)
    elif negatives is not None:
        more = torch.einsum("nd,nkd->nk", query, negatives)
        more = more / temperature + hard_hardness * more.detach()
        if negative_mask is not None:
            more = more.masked_fill(~negative_mask, -torch.inf)
        parts.append(more)
    if out_of_negatives is not None:
        parts[1] = parts[1].masked_fill(out_of_negatives, -torch.inf)
    answer = torch.arange(n, device=query.device) if in_batch else torch.zeros(n, dtype=torch.long, device=query.device)
    of_rows = decoupled_dense if decoupled else functools.partial(F.cross_entropy, reduction="none")
    loss = of_rows(torch.cat(parts, 1), answer)
    if symmetric:
        loss = (loss + of_rows(columns, torch.arange(n, device=query.device))) / 2
    return reduced(loss, reduction)


def soft_info_nce_dense(
    query, key, target, weight, temperature, label_smoothing=0.0, exclude_self=False, reduction="mean"
):
    """Labels as a dense matrix; negative targets are padding."""
    logits = query @ key.T / torch.as_tensor(temperature).reshape(-1, 1)
    weight = torch.where(target < 0, 0.0, weight).to(logits)
    labels = torch.zeros_like(logits).scatter_add(1, target.clamp(min=0), weight)
    if exclude_self:
        itself = torch.eye(len(query), dtype=torch.bool, device=query.device)
        log_prob = logits.masked_fill(itself, -torch.inf).log_softmax(1).masked_fill(itself, 0.0)
        return reduced(-(labels * log_prob).sum(1), reduction)
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction=reduction)


def margin_softmax_dense(input, weight, target, m1=1.0, m2=0.5, m3=0.0, scale=64.0, reduction="mean"):
    """One angle at a time. Targets of -100 do not count."""
    cos = F.normalize(input, dim=1) @ F.normalize(weight, dim=1).T
    counted = target >= 0
    own = cos.gather(1, target.clamp(min=0)[:, None])
    theta = own.acos()
    phi = m1 * theta + m2
    k = (phi / torch.pi).floor()
    raised = (1 - 2 * (k % 2)) * phi.cos() - 2 * k
    if m1 == 1:
        raised = torch.where(phi > torch.pi, own - m2 * math.sin(m2), raised)
    logits = scale * cos.scatter(1, target.clamp(min=0)[:, None], raised - m3)
    loss = torch.where(counted, F.cross_entropy(logits, target, reduction="none"), 0.0)
    return loss.sum() / counted.sum() if reduction == "mean" else reduced(loss, reduction)


def linear_cross_entropy_dense(
    input, weight, target, bias=None, class_weight=None, softcap=None, scale=1.0, z_loss=0.0, shift=0, **settings
):
    if shift:
        input, target = input[..., :-shift, :], target[..., shift:]
    logits = scale * input @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat, y = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    reduction = settings.pop("reduction", "mean")
    ignore = settings.get("ignore_index", -100)
    loss = F.cross_entropy(flat, y, class_weight, reduction="none", **settings)
    valid = y != ignore
    squares = torch.where(valid, z_loss * torch.logsumexp(flat, 1) ** 2, 0.0)
    if reduction == "none":
        return (loss + squares).reshape(target.shape)
    if reduction == "sum":
        return (loss + squares).sum()
    total = valid.sum() if class_weight is None else class_weight[y[valid]].sum()
    return loss.sum() / total + squares.sum() / valid.sum()  # class weights do not apply to the z-loss


def distillation_dense(student, teacher, beta, temperature=1.0):
    """The divergence of each row of logits; see `tilewise.linear_distillation_loss`."""
    log_p, log_q = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    if beta == 0:
        return _kl(log_q, log_p)
    if beta == 1:
        return _kl(log_p, log_q)
    m = (1 - beta) * log_p.exp() + beta * log_q.exp()
    log_m = m.masked_fill(m == 0, 1.0).log()  # its class has no share in either divergence
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _kl(log_p, log_q):
    """sum p log(p / q) over the classes with p > 0."""
    absent = log_p == -torch.inf
    return (log_p.exp() * (log_p - log_q).masked_fill(absent, 0.0)).sum(-1)


def sparse_distillation_dense(
    input, weight, ids, t, divergence="forward", tail="ignore", bias=None, mask=None, softcap=None, scale=1.0,
    temperature=1.0, shift=0, reduction="mean",
):  # fmt: skip
    if shift:
        input, ids, t = input[..., :-shift, :], ids[..., shift:, :], t[..., shift:, :]
        mask = None if mask is None else mask[..., shift:]
        temperature = temperature[..., shift:] if isinstance(temperature, torch.Tensor) else temperature
    logits = scale * input @ weight.T + (0.0 if bias is None else bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    temperature = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    log_p = (logits / temperature).log_softmax(-1)
    here = ids >= 0 if mask is None else (ids >= 0) & mask[..., None]
    losses = []
    for token in range(here[..., 0].numel()):  # one by one, without padding
        own = here.reshape(-1, ids.shape[-1])[token]
        log_q = t.reshape(-1, ids.shape[-1])[token][own].to(log_p.dtype)
        every, chosen = log_p.reshape(-1, log_p.shape[-1])[token], ids.reshape(-1, ids.shape[-1])[token][own]
        own_log_p = every[chosen]
        if tail == "renormalize":
            log_q = log_q - log_q.logsumexp(0)
        if tail == "bucket":
            others = torch.ones_like(every, dtype=torch.bool).index_fill(0, chosen, False)
            own_log_p = torch.cat([own_log_p, every[others].logsumexp(0, keepdim=True)])
            log_q = torch.cat([log_q, (1 - log_q.exp().sum(0, keepdim=True)).log()])
        p, q = own_log_p.exp(), log_q.exp()
        log_ratio, accepted = log_q - own_log_p, torch.minimum(p, q).sum()
        found = {
            "forward": (q * log_ratio).sum(),
            "reverse": -(p * log_ratio).sum(),
            "cross_entropy": -(q * own_log_p).sum(),
            "total_variation": 1 - accepted,
            "log_acceptance": -accepted.log(),
        }
        losses.append(found[divergence] if own.any() else every.sum() * 0.0)
    loss = torch.stack(losses).reshape(here.shape[:-1])
    return loss.sum() / here.any(-1).sum() if reduction == "mean" else reduced(loss, reduction)
