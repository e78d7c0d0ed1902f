import torch

from titan_disp.condensation.measure import mean_cosine


def test_mean_over_all_pairs():
    z = torch.randn(3, 17, 5, generator=torch.Generator().manual_seed(0)) + 0.5
    u = torch.nn.functional.normalize(z.double(), dim=-1)
    torch.testing.assert_close(mean_cosine(z), (u @ u.transpose(1, 2)).mean((1, 2)))


def test_extremes():
    one = torch.ones(1, 8, 4)
    assert mean_cosine(one).item() == 1
    assert mean_cosine(torch.cat([one, -one], 1)).item() == 0
    torch.testing.assert_close(mean_cosine(torch.eye(8)[None]), torch.tensor([1 / 8], dtype=torch.double))
