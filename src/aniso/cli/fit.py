"""``aniso fit`` and ``aniso search``: one command for each setting. Signatures are the specs' keys."""

from __future__ import annotations

from typing import Any

import typer

from aniso.cli import fit_options as opt

app = typer.Typer(help="Learn coefficients, or fine-tune, in one of the settings.", no_args_is_help=True)
search_app = typer.Typer(
    help="Search one scale for all task vectors, without learning.", no_args_is_help=True
)


@app.command("few-shot")
def few_shot(
    model: opt.Model,
    task: opt.TaskName,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    shots: opt.Shots = None,
    allow_fewer_shots: opt.AllowFewer = None,
    head: opt.HeadKind = None,
    joint: opt.Joint = None,
    out_of_domain: opt.OutOfDomain = None,
    keep: opt.Keep = None,
    view: opt.View = None,
    leave_out: opt.LeaveOut = None,
    select: opt.SelectBy = None,
    budget: opt.BudgetSize = None,
    lora: opt.LoraInPlace = None,
    factors: opt.FactorsApart = None,
    evaluations: opt.Evaluations = None,
    parallel: opt.Parallel = None,
    method: opt.Method = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Learn a new task from a few labelled pictures of each class."""
    _carry_out("few-shot", locals())


@app.command("addition")
def addition(
    model: opt.Model,
    tasks: opt.TaskNames,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    norm: opt.Norm = None,
    fraction: opt.FractionOf = None,
    method: opt.Method = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Compose the vectors of several tasks into one model that does them all."""
    _carry_out("addition", locals())


@app.command("negation")
def negation(
    model: opt.Model,
    target: opt.Target,
    control: opt.Control,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    floor: opt.Floor = None,
    method: opt.Method = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Take a task out of a model while a control task stays."""
    _carry_out("negation", locals())


@app.command("test-time")
def test_time(
    model: opt.Model,
    task: opt.OwnTask = None,
    images: opt.PictureFolder = None,
    classes: opt.ClassNames = None,
    prompts: opt.Prompts = None,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    objective: opt.ObjectiveName = None,
    train: opt.Train = None,
    online: opt.Online = None,
    power: opt.Power = None,
    threshold: opt.Threshold = None,
    trusted: opt.TrustedPictures = None,
    leave_out: opt.LeaveOut = None,
    select: opt.SelectBy = None,
    budget: opt.BudgetSize = None,
    method: opt.Method = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Adapt to pictures without a single label: a task's test pictures, or a folder of your own."""
    _carry_out("test-time", locals())


@app.command("peft")
def peft(
    model: opt.Model,
    task: opt.TaskName,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    fraction: opt.FractionOf = None,
    keep: opt.Keep = None,
    view: opt.View = None,
    leave_out: opt.LeaveOut = None,
    select: opt.SelectBy = None,
    budget: opt.BudgetSize = None,
    lora: opt.LoraInPlace = None,
    factors: opt.FactorsApart = None,
    evaluations: opt.Evaluations = None,
    parallel: opt.Parallel = None,
    method: opt.Method = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Learn a task from a share of its pictures, with as many coefficients as it can feed (random:K)."""
    _carry_out("peft", locals())


@app.command("lm")
def lm(
    model: opt.LanguageModel,
    train: opt.TrainTexts,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    val: opt.ValTexts = None,
    test: opt.TestTexts = None,
    length: opt.Length = None,
    leave_out: opt.LeaveVectorsOut = None,
    select: opt.TextSelectBy = None,
    budget: opt.BudgetSize = None,
    lora: opt.LoraInPlace = None,
    factors: opt.FactorsApart = None,
    evaluations: opt.Evaluations = None,
    parallel: opt.Parallel = None,
    method: opt.TextMethod = None,
    partition: opt.Partition = None,
    seed: opt.Seed = None,
    compare: opt.Compare = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Compose adapters of a language model so that it guesses your texts: a file of examples."""
    _carry_out("lm", locals())


@search_app.command("addition")
def search_addition(
    model: opt.Model,
    tasks: opt.TaskNames,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    fraction: opt.FractionOf = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """One scale for the sum of the tasks' vectors, chosen on validation data."""
    _carry_out("addition", {**locals(), "method": "search"})


@search_app.command("negation")
def search_negation(
    model: opt.Model,
    target: opt.Target,
    control: opt.Control,
    bank: opt.BankName = None,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    floor: opt.Floor = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    memory: opt.Memory = None,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """One negative scale for the target's vector, as far as the control allows."""
    _carry_out("negation", {**locals(), "method": "search"})


def finetune(
    model: opt.Model,
    task: opt.TaskName,
    weights: opt.Weights = None,
    linearised: opt.Linearised = None,
    lora: opt.Lora = None,
    targets: opt.LoraTargets = None,
    seed: opt.Seed = None,
    split_seed: opt.SplitSeed = None,
    compare: opt.Compare = None,
    on_bad_image: opt.OnBadImage = None,
    epochs: opt.Epochs = None,
    lr: opt.Lr = None,
    batch: opt.BatchSize = None,
    weight_decay: opt.WeightDecay = None,
    warmup: opt.Warmup = None,
    clip: opt.Clip = None,
    shape: opt.Shape = None,
    least_batches: opt.LeastBatches = None,
    precision: opt.Precision = None,
    micro_batch: opt.MicroBatch = None,
    optimiser: opt.OptimiserName = None,
    out: opt.Out = None,
    data: opt.DataRoot = None,
    workers: opt.Workers = 0,
    device: opt.Device = None,
    resume: opt.Resume = False,
    allow_env_change: opt.AllowEnvChange = False,
    tensorboard: opt.TensorBoard = False,
    plan: opt.Plan = False,
    print_spec: opt.PrintSpec = False,
    json: opt.Json = False,
) -> None:
    """Fine-tune a model on a task, for a bank to make a task vector of: all weights, or a LoRA."""
    _carry_out("finetune", locals())


def _carry_out(kind: str, said: dict[str, Any]) -> None:
    from aniso.cli.fit_run import carry_out

    carry_out(kind, said)
