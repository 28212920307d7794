"""YAML 1.2 without surprises: plain data or a refusal that names the line, the key and the likely word."""

from aniso.experiments.strict_yaml.checking import validated
from aniso.experiments.strict_yaml.document import Document, refusal
from aniso.experiments.strict_yaml.reading import parse_yaml, read_yaml
from aniso.experiments.strict_yaml.setting import with_values
from aniso.experiments.strict_yaml.writing import as_yaml

__all__ = ["Document", "as_yaml", "parse_yaml", "read_yaml", "refusal", "validated", "with_values"]
