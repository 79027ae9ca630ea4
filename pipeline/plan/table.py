"""A plan as text: tables, what each figure comes from, and the words to run it with."""

from rich.console import Console
from rich.table import Table

from pipeline.plan.formulas import saved_bytes_per_token
from pipeline.plan.settings import PlanSettings
from pipeline.plan.shapes import ModelShape
from pipeline.plan.stages import BENCH_ROWS, Plan
from pipeline.plan.training import ONE_PROCESS, ONLINE, TrainingPlan

#: Columns of the memory table, and the parts of a stage's memory that each one adds up.
COLUMNS = {
    "target": ("weights", "target", "target weights"),
    "draft": ("draft weights", "bf16 weights"),
    "gradients": ("gradients",),
    "optimiser": ("optimiser",),
    "KV caches": ("kv cache", "kv caches"),
    "activations": ("activations", "logits"),
    "other": ("buffers", "overhead"),
}


def show(console: Console, plan: Plan, settings: PlanSettings) -> None:
    """Print everything."""
    console.print(_models(plan, settings), soft_wrap=True)
    console.print(time_table(plan))
    console.print(memory_table(plan))
    console.print(_disk(plan), soft_wrap=True)
    console.print("\n[bold]where the figures come from[/] (docs/planning.md)")
    for line in explanations(plan, settings):
        console.print(f"- {line}", soft_wrap=True)
    console.print("\n[bold]to run it so[/]")
    for line in commands(plan):
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _models(plan: Plan, settings: PlanSettings) -> str:
    def size(shape: ModelShape) -> str:
        return f"{shape.name} ({shape.num_parameters / 1e9:.2f}G parameters)"

    return (
        f"target {size(plan.target)}, draft {size(plan.draft)}, {settings.num_tokens:,} response tokens, "
        f"{plan.num_gpus} x {plan.gpu.name}. Estimates; GB are 10^9 bytes."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def time_table(plan: Plan) -> Table:
    """GPU-hours by stage. preflight and export take minutes and have no row."""
    table = Table("stage", "GPUs", "GPU-hours", "hours", "bound by", title="time, by roofline")
    corpus = plan.corpus
    used = corpus.tensor_parallel * corpus.num_replicas
    for part, hours in corpus.gpu_hours.items():
        bound = "compute" if part == "prompts" else corpus.step.bound
        table.add_row(f"corpus: {part}", str(used), _hours(hours), _hours(hours / used), bound)
    for teacher in dict.fromkeys(training.teacher for training in plan.distill):
        training = _of_teacher(plan, teacher)
        if training is not None:
            gpus, hours = training.num_gpus, training.gpu_hours
            name = f"distill: {teacher} teacher, {training.launch}"
            table.add_row(name, str(gpus), _hours(hours), _hours(hours / gpus), training.bound)
    native = plan.native
    if native.fits:
        table.add_row("eval", "1", _hours(native.eval_gpu_hours), _hours(native.eval_gpu_hours), "compute")
        bench = _hours(native.bench_gpu_hours)
        table.add_row("bench, at most", "1", bench, bench, "memory bandwidth")
    else:
        table.add_row("eval, bench", "1", "-", "-", "do not fit on one GPU")
    return table


def _of_teacher(plan: Plan, teacher: str) -> TrainingPlan | None:
    """The first launch of `choose`'s order that fits, with this teacher."""
    if plan.chosen.teacher == teacher:
        return plan.chosen
    fitting = [training for training in plan.distill if training.teacher == teacher and training.fits]
    fitting.sort(key=lambda training: training.launch == ONE_PROCESS)
    return fitting[0] if fitting else None


def memory_table(plan: Plan) -> Table:
    """GB on one GPU."""
    title = f"GB on one GPU, of {plan.gpu.usable_bytes / 1e9:.1f} usable"
    table = Table("stage", *COLUMNS, "total", "fits", title=title)
    corpus = plan.corpus
    name = f"corpus: vLLM, tensor parallel {corpus.tensor_parallel}, {corpus.batch} rows"
    _memory_row(table, name, corpus.memory_gb, fits=True)
    for training in plan.distill:
        name = f"distill: {training.teacher}, {training.launch}"
        _memory_row(table, name, training.memory_gb, fits=training.fits)
    _memory_row(table, f"preflight, eval, bench: {BENCH_ROWS} rows", plan.native.memory_gb, fits=plan.native.fits)
    return table


def _memory_row(table: Table, name: str, memory_gb: dict[str, float], *, fits: bool) -> None:
    sizes = [sum(memory_gb.get(part, 0.0) for part in parts) for parts in COLUMNS.values()]
    assert abs(sum(sizes) - sum(memory_gb.values())) < 1e-6, "a part of the memory has no column"
    table.add_row(name, *(f"{size:.2f}" if size else "-" for size in sizes), f"{sum(sizes):.1f}", "yes" if fits else "no")


def _hours(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}" if hours >= 0.1 else f"{hours:.1g}"


def _disk(plan: Plan) -> str:
    return "disk: " + "; ".join(f"{name} {size:,.2f} GB" for name, size in plan.disk_gb.items())


def explanations(plan: Plan, settings: PlanSettings) -> list[str]:
    """One line for each kind of figure, with the numbers put in."""
    corpus, gpu, chosen, draft = plan.corpus, plan.gpu, plan.chosen, plan.draft
    step, per_token = corpus.step, plan.corpus_bytes_per_token
    saved = saved_bytes_per_token(draft, train_embeddings=settings.train_embeddings)
    return [
        f"weights: 2 bytes each in bf16. KV cache: 2 x layers x key heads x head size x 2 bytes = {corpus.kv_bytes_per_position:,} "
        f"bytes a position on each GPU; {corpus.batch} rows of {settings.row_tokens} positions fit beside the weights",
        f"decoding: a step reads all weights and caches once at {_percent(settings.decode_utilisation)} of {gpu.bandwidth_gb_s:g} GB/s "
        f"({1e3 * step.memory_s:.1f} ms), computes at {_percent(settings.decode_utilisation)} of {gpu.bf16_tflops:g} TFLOPs "
        f"({1e3 * step.compute_s:.1f} ms), and sends {1e3 * step.link_s:.1f} ms between GPUs: {1e3 * step.seconds:.1f} ms for "
        f"{corpus.batch} tokens, {corpus.tokens_per_second:,.0f} tokens/s a replica; weights alone would be bound by compute above "
        f"{corpus.ridge_batch:.0f} rows",
        f"prompts and training: 2 FLOPs for each weight and token forward, 4 backward, at {_percent(settings.prefill_utilisation)} and "
        f"{_percent(settings.train_utilisation)} of the peak; {settings.epochs:g} epochs; heads at response tokens only",
        "training: fp32 weights 4, gradients 4, AdamW 8 bytes for each trained parameter "
        f"(embeddings and head {'trained' if settings.train_embeddings else 'frozen'}), bf16 copies 2; activations {saved:,} bytes a "
        f"token, no checkpointing; one chunk of {settings.head_chunk_tokens} rows of logits",
        "target in training: "
        + ("the distill stage keeps it for held-out acceptance, with the cached teacher too" if settings.keep_target
           else "with the live teacher only (keep_target=false)"),
        f"disk: {per_token['stored']:.0f} bytes a token at k = {settings.topk} (4 + 6 k = {per_token['uncompressed']:.0f} before "
        "compression; 214 of 384 were measured at k = 64)",
        "launch: ddp where every GPU holds everything, else fsdp, else deepspeed with AdamW's moments in the machine's memory"
        + (f" ({chosen.host_gb:.0f} GB)" if chosen.host_gb else "") + "; one process on one GPU",
    ]  # fmt: skip


def commands(plan: Plan) -> list[str]:
    """Settings of the two stages that the plan is about."""
    chosen, corpus = plan.chosen, plan.corpus
    launch = "" if chosen.launch == ONE_PROCESS else f" LAUNCH={chosen.launch}"
    engine = f"'corpus.engine_args={{tensor_parallel_size: {corpus.tensor_parallel}}}'"
    lines = [
        f"corpus: corpus.backend=vllm corpus.batch_size={corpus.batch} {engine}, {corpus.num_replicas} such "
        f"process{'es' if corpus.num_replicas > 1 else ''}",
        f"training: make distill{launch} with train.tokens_per_step={chosen.micro_batch_tokens} "
        f"train.gradient_accumulation_steps={chosen.accumulation_steps} loss.teacher={chosen.teacher}",
    ]
    if not any(training.fits for training in plan.distill if training.teacher == ONLINE):
        lines.append("loss.teacher=online does not fit in any way on these GPUs")
    return lines
