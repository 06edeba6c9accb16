"""A user script that torchrun starts in every process. Prints the errors against one process."""

import torch
import torch.distributed as dist

import tilewise as tw


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    image, text = (torch.randn(3 * world + 1, 8, dtype=torch.float64) for _ in range(2))
    own = slice(3 * rank, 3 * rank + (4 if rank == world - 1 else 3))
    a, b = image[own].clone().requires_grad_(), text[own].clone().requires_grad_()
    loss = tw.clip_loss(a, b, 0.5, group=dist.group.WORLD)
    loss.backward()
    whole = image.clone().requires_grad_()
    want = tw.clip_loss(whole, text, 0.5)
    want.backward()
    shares = [torch.zeros_like(loss) for _ in range(world)]
    dist.all_gather(shares, loss.detach())
    value = abs(sum(shares) / world - want).item()
    gradient = (a.grad / world - whole.grad[own]).abs().max().item()
    print(f"rank {rank} of {world}: loss {value:.1e}, gradient {gradient:.1e}", flush=True)
    dist.destroy_process_group()
    assert max(value, gradient) < 1e-12


if __name__ == "__main__":
    main()
