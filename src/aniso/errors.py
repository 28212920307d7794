"""The errors that aniso raises.

* AnisoError
  * UsageError        exit 2   the command or its arguments are invalid
  * InputError        exit 3   a file cannot be read, or does not fit the others
  * UnsafeError       exit 4   a file holds what no data file should hold
  * ResourceError     exit 5   disk, memory or permission ran out
  * NumericalError    exit 6   a value left the range it can be stored in
  * CellsError        exit 7   some cells of an experiment did not finish
  * LockedError       exit 8   another process is writing there
  * StoppedError      exit 130 the run was interrupted; 128 + the signal's number

Every error names its subject, what is wrong, what was found and expected, and what to type next.
Its ``code`` (``CKPT-SHAPE``) can be looked up with ``aniso explain CODE``.
"""

from __future__ import annotations

from typing import Any, ClassVar

_SHOWN = 160


def printable(text: object, limit: int = _SHOWN) -> str:
    """Return untrusted text in a form that is safe for a terminal: escaped and cut to length."""
    raw = str(text)
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in raw[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


class AnisoError(Exception):
    """The base of all errors of aniso; ``facts`` are shown as a table under the message."""

    exit_code: ClassVar[int] = 1

    def __init__(self, code: str, message: str, *, likely: str = "", fix: str = "", **facts: object) -> None:
        self.code = code
        self.message = message
        self.facts = {name: value for name, value in facts.items() if value not in (None, "")}
        self.likely = likely
        self.fix = fix
        super().__init__(code, message)

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {printable(self.message, 600)}"]
        rows = {**self.facts, "likely": self.likely, "fix": self.fix}
        for name, value in rows.items():
            if value == "":
                continue
            values = value if isinstance(value, list) else [value]
            for i, line in enumerate(values):
                lines.append(f"  {name if i == 0 else '':<9} {printable(line, 600)}")
        lines[-1] += f"      (aniso explain {self.code})"
        return "\n".join(lines)

    def in_one_line(self, limit: int = 400) -> str:
        """Return the message and the facts, for tables."""
        facts = "; ".join(f"{name}: {value}" for name, value in self.facts.items())
        return printable(f"{self.message}; {facts}" if facts else self.message, limit)

    def __reduce__(self) -> tuple[Any, ...]:
        # by default, keyword-only facts are lost when an error is pickled
        return _rebuild, (type(self), self.code, self.message, self.likely, self.fix, self.facts)

    def to_json(self) -> dict[str, Any]:
        facts = {
            name: [printable(v, 600) for v in value] if isinstance(value, list) else printable(value, 600)
            for name, value in self.facts.items()
        }
        return {
            "error": self.code,
            "message": printable(self.message, 600),
            "facts": facts,
            "likely": self.likely,
            "fix": self.fix,
            "exit": self.exit_code,
        }


def _rebuild(
    kind: type[AnisoError], code: str, message: str, likely: str, fix: str, facts: dict[str, Any]
) -> AnisoError:
    return kind(code, message, likely=likely, fix=fix, **facts)


class UsageError(AnisoError):
    exit_code = 2


class InputError(AnisoError):
    exit_code = 3


class UnsafeError(AnisoError):
    exit_code = 4


class ResourceError(AnisoError):
    exit_code = 5


class NumericalError(AnisoError):
    exit_code = 6


class CellsError(AnisoError):
    exit_code = 7


class LockedError(AnisoError):
    exit_code = 8


class StoppedError(AnisoError):
    exit_code = 130

    def __init__(self, code: str, message: str, *, likely: str = "", fix: str = "", **facts: object) -> None:
        super().__init__(code, message, likely=likely, fix=fix, **facts)
        self.exit_code = 128 + int(str(facts.get("signal", 2)))  # type: ignore[misc]  # as shells say it


EXPLANATIONS: dict[str, str] = {
    "PROCESS-LOST": "A run that several processes share (--devices, torchrun) ends when one of them ends: "
    "each has a part of the bank and of every batch. Look for the message of the one that failed first; a "
    "process that was killed leaves none, and too little memory is the usual reason.",
    "DATA-ITEM": "A task of texts needs a sentence encoder: a directory of sentence-transformers, or a "
    "BERT-like model of transformers; a task of images needs a CLIP or an image classifier.",
    "FILE-MISSING": "The path does not exist. If you meant a hub id, write it as owner/name or "
    "owner/name@revision.",
    "FILE-EMPTY": "The file holds no bytes, or too few to be any weight format. A download that failed at "
    "once leaves such files: fetch it again.",
    "FILE-KIND": "Only regular files and directories are opened. Pipes, sockets and devices could block for "
    "ever or never end.",
    "FILE-FORMAT": "The first bytes match no format that aniso reads: safetensors, torch zip or legacy "
    "pickles. The file's suffix plays no part in this.",
    "FILE-TRUNCATED": "The file ends before its own header says it should. Download it again.",
    "FILE-CHANGED": "The file changed while it was being read, so what was read may be a mixture.",
    "FILE-ACCESS": "The operating system refused to open the file.",
    "FILE-HASH": "The content differs from the sha256 recorded when the file was written. Some byte changed "
    "since: restore the file or build it again.",
    "FILE-POINTER": "Git stored a pointer in place of the large file. `git lfs pull` in that repository "
    "fetches the real one.",
    "FILE-PAGE": "A web page or an error message was saved in place of the weights; the download address "
    "was wrong or needed a login.",
    "REMOTE-URI": "Adapters are read from a directory, or from s3://, gs://, hf://, https:// and http:// "
    "addresses. Other protocols, and addresses inside of others (::), are refused.",
    "REMOTE-PACKAGE": "Object stores are read with packages that are not installed with aniso itself.",
    "REMOTE-READ": "A request to a remote store failed, or returned too few bytes, each time it was tried. "
    "Of many adapters, the one concerned is left out; the next run tries it again.",
    "CATALOGUE": "A catalogue of adapters is a parquet file written by aniso catalogue. Files with other "
    "columns, or damaged ones, are refused; it can always be built again.",
    "SCORES": "A directory of scores holds parquet files written by aniso select --scores, and the gradient "
    "that they were computed with. Files of another gradient are not mixed with them.",
    "ST-HEADER": "The safetensors header is malformed in a way no writer produces by accident.",
    "ST-OFFSETS": "A tensor's byte range in a safetensors file overlaps another, leaves a hole, or does not "
    "match its shape and dtype. Such a file can be crafted to make readers disagree, so it is refused.",
    "ST-TRAILING": "Bytes follow the last tensor of a safetensors file. They could be a second file that "
    "other programs read instead.",
    "WEIGHT-DTYPE": "Task vectors are computed from 16, 32 and 64 bit floats. Convert quantised or 8-bit "
    "weights with the tool that made them.",
    "WEIGHT-NAME": "There is no tensor of that name in the file.",
    "WEIGHT-LABEL": "A tensor's name is empty, longer than 65,536 letters, or not valid Unicode. Such a name "
    "can be neither printed nor written to another file.",
    "WEIGHT-NONFINITE": "A weight is NaN or infinite. Arithmetic on it would spread to every composition; "
    "pass --allow-nonfinite only to look at the file.",
    "PICKLE-CALL": "A pickle is a program. This one would call functions that no list of "
    "tensors needs. aniso never runs pickles, so nothing happened; the file is refused because its author "
    "may have changed the tensors, too. `aniso convert --tensors-only` extracts the tensors.",
    "PICKLE-LIMIT": "The pickle needs more operations, memory or nesting than any real checkpoint does.",
    "PICKLE-MALFORMED": "The pickle's own bookkeeping is inconsistent, so no two readers need agree on what "
    "it contains.",
    "PICKLE-VIEW": "A tensor in the pickle claims elements outside of the storage it points to, or more "
    "elements than the storage holds.",
    "PICKLE-STORAGE": "A storage in the checkpoint has a different size than the pickle declares.",
    "PICKLE-UNSUPPORTED": "The checkpoint keeps tensors in a form that is not a plain array (sparse, "
    "quantised, or a plain pickle.dump). Save its state_dict with safetensors.",
    "ZIP-UNSAFE": "The zip archive around the checkpoint has properties torch never writes: compression, "
    "encryption, overlapping or duplicate entries, names that leave the archive.",
    "ZIP-CRC": "An entry of the checkpoint archive does not match its checksum; the file is damaged.",
    "TORCHSCRIPT": "A TorchScript archive holds code beside its weights. Load it with torch.jit where you "
    "trust it, and save its state_dict with safetensors.",
    "CKPT-AMBIGUOUS": "More than one part of the checkpoint looks like model weights. Name the one you mean "
    "as FILE::entry.",
    "CKPT-NONE": "No tensors were found under any rule.",
    "CKPT-LINEARISED": "The checkpoint is of a linearised model: it stores its parameters by position. "
    "Standard and linearised vectors must not be mixed.",
    "CKPT-SHAPE": "A tensor has a different shape than in the base. Usually the model has a different size "
    "or resolution; aniso never resizes.",
    "CKPT-KEYS": "Names are missing from the fine-tuned model, or it has names the base lacks. Pairing is by "
    "name alone. --skip-key and --rename state an exception explicitly.",
    "CKPT-BUFFER": "A tensor that is not part of a task vector (an integer buffer, the logit scale, the text "
    "tower) differs between base and fine-tuned model, so the vector would not reproduce the model. "
    "Leave it out on purpose with --skip-key.",
    "CKPT-ACTIVATION": "The same weights under QuickGELU and GELU are two different models. Base and "
    "fine-tuned model must agree.",
    "VECTOR-ZERO": "The fine-tuned model equals the base in every block.",
    "VECTOR-DISTANT": "The difference to the base is about as large as the base itself; fine-tuning moves "
    "weights by a few per cent. The model was probably tuned from another base.",
    "VECTOR-BASE": "The vector has a different base; base fingerprints must agree.",
    "VECTOR-RANGE": "A value does not fit the requested number format. Choose --dtype bf16 or fp32.",
    "VECTOR-FILE": "The file is a valid safetensors file but not a task vector written by aniso.",
    "LAYOUT-SCHEME": "The names in the file do not follow the requested naming scheme.",
    "LAYOUT-CONVERT": "Only CLIP models with a vision transformer have both an open_clip and a Hugging Face "
    "form.",
    "DIR-EMPTY": "The directory holds no weights under any of the names the field uses.",
    "DIR-INDEX": "The shard index and the shards disagree.",
    "DIR-PATH": "The shard index points outside of its directory.",
    "DIR-CONFIG": "The directory's configuration file is not valid JSON, not an object, or describes no "
    "model that can be built. Only plain settings of known architectures are followed: a key that names a "
    "file, a URL or a repository is refused, since the library that builds the model might load it.",
    "HUB-OFFLINE": "The model is not in the local cache and the network is switched off.",
    "HUB-FETCH": "The hub did not deliver the model.",
    "HUB-PUSH": "The directory cannot be uploaded as it is, or the hub did not accept it.",
    "LORA-KIND": "Only adapters whose update can be computed exactly are read: LoRA, rsLoRA and DoRA with "
    "rank and alpha patterns. Merge the adapter with the tool that made it and use the merged checkpoint.",
    "LORA-INIT": "PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base's weights before training, so "
    "alpha/r*B*A is not the difference to the base. PEFT can convert such an adapter on saving: "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...).",
    "LORA-CONFIG": "The adapter's configuration is missing a field, or holds a value PEFT would not write.",
    "LORA-KEYS": "Every tensor of an adapter must have its place in the base; nothing is skipped silently.",
    "LORA-RANK": "The rank in the configuration differs from the rank of the tensors.",
    "BANK-MANIFEST": "The directory has no readable bank manifest of a known version.",
    "BANK-NAME": "Vector names are unique within a bank and limited to letters, digits and . _ + -",
    "BANK-FEATURES": "Selecting vectors by features needs the mean feature of each task's "
    "images. aniso bank features computes them once and stores them in the bank.",
    "BANK-BASE": "All vectors of a bank are differences to the same base.",
    "BANK-LAYOUT": "All vectors of a bank have the same blocks with the same shapes.",
    "MERGE-RANK": "Spectral merge rules keep some singular components of every vector. A matrix with fewer "
    "of them than vectors has no room for that, and the published code silently returns less.",
    "MERGE-VECTORS": "The merge rule is not defined for these vectors: there are too few, or two are equal.",
    "START": "Learning starts at zero, which is the base, or at other coefficients: a constant, a profile "
    "over layers, a file, a least-squares solution, or a merge rule.",
    "PARTITION": "A partition is whole, blocks, rows, columns, random:K or components:K, for all blocks or "
    "for those of some families. Components are those of vectors that are stored as factors: LoRA adapters, "
    "and banks in storage svd:K.",
    "COEF-FILE": "The file is a valid safetensors file but holds no coefficients written by aniso, or its "
    "index is damaged.",
    "COEF-VALUES": "A coefficient is NaN or infinite, or there are more or fewer of them than vectors, "
    "blocks and parts make.",
    "COEF-BANK": "Coefficients mean something only together with the vectors they were learned with. The "
    "same vectors in another storage are fine; other vectors of the same name are not.",
    "COEF-LAYOUT": "Coefficients are matched with blocks by name. Query, key and value may be one block or "
    "three; everything else must agree.",
    "COEF-PARTITION": "Coefficients belong to the partition they were learned with: rule, number of parts "
    "and seed decide what each of them scales.",
    "MERGEKIT": "A mergekit configuration and coefficients cannot express each other.",
    "MODEL-COPY": "A composition works on a copy of the model's modules that shares their weights.",
    "PLAN-MEMORY": "The composed weights alone, with two small buffers, need more memory than is allowed.",
    "MODEL-NAME": "Models are named by open_clip's architecture names, by a directory or hub id with a "
    "configuration, as timm:NAME, or as mini, the small model that comes with aniso.",
    "MODEL-WEIGHTS": "The weights are not on this machine and could not be fetched, or none were named.",
    "MODEL-TOWER": "A dual encoder compares features of an image tower and a text tower: each gives one "
    "row per item, and both have the same width, if need be by a projection.",
    "MODEL-TEXT": "Class weights are made from text, so they need a model with a text tower, or a classifier "
    "with a head of its own.",
    "MODEL-TOKENIZER": "The tokenizer's files are missing or belong to another model. A wrong one gives "
    "class weights that look right and are not.",
    "MODEL-CLASSES": "A classifier without a text tower knows only the classes it was trained for; they are "
    "matched by name.",
    "MODEL-LENGTH": "A language model has a largest number of tokens that it reads at once.",
    "MODEL-LIBRARY": "The library that this needs is an optional extra of aniso.",
    "DATA-CARD": "A task card is a small TOML file; a key that is not known is an error, so that a typing "
    "mistake cannot pass for a setting.",
    "DATA-CLASS": "Classes are matched by name, never by position: every name must be unique, every class "
    "of a split must be one of the task's.",
    "DATA-PROMPT": "A prompt has one pair of braces, where the class name goes.",
    "DATA-SPLIT": "The task does not have that split or part.",
    "DATA-CAPTION": "An image tower is aligned to a text tower by captions: every image has at least one "
    "that is not empty, and the text tower reads all of it.",
    "DATA-TEXT": "Texts are read from a plain text file, or from JSON lines of prompts and completions; "
    "none of them may be empty.",
    "DATA-SHOTS": "A class has fewer images than the number of shots, or a share of a split holds none.",
    "DATA-EMPTY": "A folder without images would become a class that can be neither learned nor tested.",
    "DATA-LABEL": "Every image has one label, and every label is one of the classes.",
    "DATA-FORMAT": "The files are not in one of the layouts that are read, or are damaged.",
    "DATA-PATH": "A path in a list or a table, or a symbolic link, leaves the directory it belongs to. A "
    "link in an untrusted dataset could name any file of this machine.",
    "DATA-MISSING": "The dataset, or a file of it, does not exist at this path.",
    "DATA-TAR": "Archives are read in place: only plain files with plain names are accepted in them.",
    "DATA-HASH": "The files differ from the published ones, and their format could run code: they are not "
    "opened.",
    "IMAGE-READ": "The image is damaged, empty or in a format that is not read. Images can be left out "
    "with --on-bad-image skip; a note lists them.",
    "IMAGE-BOMB": "A small file that unpacks to an enormous image is a known way to exhaust a machine.",
    "OBJECTIVE": "An objective is a signed sum of terms, each bound to a split or to the coefficients.",
    "KEEP": "A keep rule chooses an epoch by accuracies on labelled splits that are not for testing, or by "
    "agreement with teachers on unlabelled ones.",
    "LEARN-TEST": "Test labels are for evaluation only: what is learned from them, or selected by them, says "
    "nothing about new images.",
    "LEARN-NONFINITE": "A loss or a feature became NaN or infinite. The best epoch before is kept.",
    "LEARN-COLLAPSE": "Features or predictions became equal for all items, at every learning rate tried.",
    "LEARN-GRADIENT": "The first step's gradient is zero everywhere, so nothing would ever be learned.",
    "HEAD-CLASS": "A head needs at least one image of each class, and two classes or more: a class "
    "without images would never be predicted.",
    "HEAD-FEATURES": "A head belongs to the features it was learned on. Those of another model, or of other "
    "coefficients, are different, and its predictions on them would be noise.",
    "HEAD-OPTION": "Every head has options of its own, such as the momentum of LP++; aniso fit few-shot "
    "--head lpp --head-option x=1 lists those of a head with their defaults.",
    "HEAD-FILE": "A head is a safetensors file that aniso fit … --head writes beside the coefficients.",
    "RUN-FILES": "The directory of a run lacks a file that a command needs, or is no directory of a run.",
    "RUN-STATE": "The checkpoint of a run is damaged, or there is none.",
    "RUN-CHANGED": "A run can be resumed only with the same inputs and settings; otherwise its result would "
    "be neither the old run's nor a new one's. A run's model can be written only with the base that it was "
    "measured with.",
    "STOPPED": "The run was interrupted (Ctrl-C, or by the system). Its state was saved if it has a "
    "directory; --resume continues from there, with the same result as without the interruption.",
    "SPEC": "A spec is a YAML 1.2 file. A key that is not known is an error, so that a typing mistake cannot "
    "pass for a setting.",
    "RECORD": "A record is the JSON file that one cell of an experiment leaves behind.",
    "CELLS": "Some cells of an experiment did not finish; those that did are recorded.",
    "OUT-EXISTS": "Existing outputs are not overwritten without --overwrite.",
    "OUT-WRITE": "The output could not be written; what was there before is untouched.",
    "OUT-SPACE": "There is not enough space for the output on that disk; nothing was started.",
    "OUT-MEMORY": "The machine ran out of memory. Banks are built and read one block at a time; a "
    "whole model as a state dict needs memory for all of it.",
    "OUT-LOCKED": "Another process is changing the same bank. Wait for it, then try again.",
    "USAGE": "The command line contradicts itself.",
}
