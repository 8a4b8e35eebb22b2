"""Models in plain torch with the structure of well-known ones, and a PEFT one."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from checkpointing.families import Batch, Family, causal, ids, text_batch


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block with drop path, as in timm's ViT and litgpt's GPT."""

    def __init__(self, width: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._drop(self.attn(self.norm1(x)))
        return x + self._drop(self.mlp(self.norm2(x)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_path == 0.0:
            return x
        keep = torch.rand(x.shape[0], 1, 1) >= self.drop_path
        return x * keep / (1.0 - self.drop_path)


class TimmViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 16) * 0.02)
        self.blocks = nn.Sequential(*[Block(16, 0.2) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class ConvNeXtStage(nn.Module):
    def __init__(self, width_in: int, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.GroupNorm(1, width_in), nn.Conv2d(width_in, width, 2, 2))
        self.blocks = nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.downsample(x))


class TimmConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.GroupNorm(1, 4))
        widths = [4, 4, 8, 16]
        self.stages = nn.Sequential(
            *[ConvNeXtStage(a, b, depth) for a, b, depth in zip(widths, widths[1:], (1, 2, 1), strict=False)]
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(image)))


class Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width_in != 2 * width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, 2 * width, 1, stride), nn.BatchNorm2d(2 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """As in timm and torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Bottleneck(8, 4, 1), Bottleneck(8, 4, 1))
        self.layer2 = nn.Sequential(Bottleneck(8, 8, 2), Bottleneck(16, 8, 1), Bottleneck(16, 8, 1))
        self.layer3 = nn.Sequential(Bottleneck(16, 16, 2))
        self.fc = nn.Linear(32, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(image)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


class MBConv(nn.Module):
    """An inverted residual whose activations work in place, on what convolutions and batch norms gave."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        hidden = 2 * width_in
        self.keeps_shape = stride == 1 and width_in == width
        expand = nn.Sequential(nn.Conv2d(width_in, hidden, 1), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True))
        depthwise = nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden)
        project = nn.Sequential(nn.Conv2d(hidden, width, 1), nn.BatchNorm2d(width))
        self.block = nn.Sequential(expand, nn.Sequential(depthwise, nn.SiLU(inplace=True)), project)
        self.squeeze = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        y = y * F.relu_(self.squeeze(y.mean((2, 3), keepdim=True)))
        return y + x if self.keeps_shape else y


class EfficientNet(nn.Module):
    """As in torchvision: stages of one and two blocks, where the first of a stage differs from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, 2, padding=1), nn.SiLU(inplace=True)),
            nn.Sequential(MBConv(4, 4, 1)),
            nn.Sequential(MBConv(4, 8, 2), MBConv(8, 8, 1)),
            nn.Sequential(MBConv(8, 16, 2), MBConv(16, 16, 1), MBConv(16, 16, 1)),
        )
        self.classifier = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(image).mean((2, 3)))


class Down(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(width_in, width, 3, 2, padding=1), nn.GroupNorm(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.convolutions(x))


class Up(Down):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, scale_factor=4)
        return F.relu(self.convolutions(torch.cat([x, F.interpolate(skip, x.shape[-2:])], 1)))


class UNet(nn.Module):
    """Without containers, as is common: its blocks are numbered attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = nn.Conv2d(3, 4, 3, padding=1)
        self.down1, self.down2 = Down(4, 8), Down(8, 16)
        self.up1, self.up2 = Up(24, 8), Up(12, 4)
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = self.inc(image)
        second = self.down1(first)
        return self.outc(self.up2(self.up1(self.down2(second), second), first))


class TorchvisionConvNeXt(nn.Module):
    """All in one `Sequential`: stem, stage, downsampling, stage, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.GroupNorm(1, 4)),
            nn.Sequential(ConvNeXtBlock(4), ConvNeXtBlock(4)),
            nn.Sequential(nn.GroupNorm(1, 4), nn.Conv2d(4, 8, 2, 2)),
            nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8), ConvNeXtBlock(8)),
        )
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(image))


class EncoderDecoder(nn.Module):
    """`nn.TransformerEncoder` and `nn.TransformerDecoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        sizes: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 3)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)
        self.head = nn.Linear(16, 32)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros_like(source, dtype=torch.bool)
        padding[0, -2:] = True
        memory = self.encoder(self.embed(source), src_key_padding_mask=padding)
        causal_mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.decoder(self.embed(target), memory, tgt_mask=causal_mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class LitGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(32, 16),
                "h": nn.ModuleList([Block(16) for _ in range(3)]),
                "ln_f": nn.LayerNorm(16),
            }
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](tokens)
        for block in self.transformer["h"]:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.transformer["ln_f"](x)).flatten(0, 1), tokens.flatten())


class Residual(nn.Sequential):
    """A user's own block, which is a container and has a forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(input)


class UserSequential(nn.Sequential):
    def __init__(self) -> None:
        blocks = [Residual(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
        super().__init__(nn.Linear(3, 16), *blocks, nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def lora() -> nn.Module:
    import peft

    settings = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(causal("Llama", num_key_value_heads=1)(), settings)


def images() -> Batch:
    return {"image": torch.randn(2, 3, 16, 16)}


STRUCTURES: dict[str, Family] = {
    "PEFT LoRA on Llama": Family(lora, text_batch, {"base_model.model.model.layers": ("LlamaDecoderLayer", 3)}),
    "ViT (as in timm)": Family(TimmViT, images, {"blocks": ("Block", 3)}),
    "ConvNeXt (as in timm)": Family(
        TimmConvNeXt,
        images,
        {f"stages.{stage}.blocks": ("ConvNeXtBlock", depth) for stage, depth in enumerate((1, 2, 1))},
    ),
    "ResNet (as in timm, torchvision)": Family(
        ResNet, images, {"layer1": ("Bottleneck", 2), "layer2": ("Bottleneck", 3), "layer3": ("Bottleneck", 1)}
    ),
    "ConvNeXt (as in torchvision)": Family(
        TorchvisionConvNeXt, images, {"features.1": ("ConvNeXtBlock", 2), "features.3": ("ConvNeXtBlock", 3)}
    ),
    "EfficientNet (as in torchvision)": Family(
        EfficientNet, images, {"features.1": ("MBConv", 1), "features.2": ("MBConv", 2), "features.3": ("MBConv", 3)}
    ),
    "U-Net without containers": Family(UNet, images, {"": ("Down, Up", 4)}),
    "nn.TransformerEncoder, Decoder": Family(
        EncoderDecoder,
        lambda: {"source": ids(), "target": ids()},
        {"encoder.layers": ("TransformerEncoderLayer", 3), "decoder.layers": ("TransformerDecoderLayer", 2)},
    ),
    "GPT in a ModuleDict (as in litgpt)": Family(LitGPT, lambda: {"tokens": ids()}, {"transformer.h": ("Block", 3)}),
    "nn.Sequential of user blocks": Family(UserSequential, lambda: {"x": torch.randn(4, 3)}, {"": ("Residual", 3)}),
}
