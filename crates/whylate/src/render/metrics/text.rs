// SPDX-License-Identifier: MIT OR Apache-2.0
//! Metrics as text: Prometheus' format 0.0.4, and OpenMetrics 1.0.0. Start times of counters are in messages only: as
//! text, each would be a series.

use std::fmt::{self, Write};

use super::messages::{Exemplar, Label, Metric, MetricFamily, Type};

/// Writes all families as Prometheus' text format, or as OpenMetrics, which also has exemplars.
pub fn write(out: &mut String, families: &[MetricFamily], is_open: bool) -> fmt::Result {
    families.iter().try_for_each(|family| write_family(out, family, is_open))?;
    if is_open { out.write_str("# EOF\n") } else { Ok(()) }
}

fn write_family(out: &mut String, family: &MetricFamily, is_open: bool) -> fmt::Result {
    let name = family.name.as_str();
    // A counter of OpenMetrics is named without the suffix of its samples.
    let without_suffix = name.strip_suffix("_total").unwrap_or(name);
    let of = if is_open { without_suffix } else { name };
    let kind = match family.r#type() {
        Type::Counter => "counter",
        Type::Gauge => "gauge",
        Type::Histogram => "histogram",
    };
    writeln!(out, "# HELP {of} {}", family.help)?;
    writeln!(out, "# TYPE {of} {kind}")?;
    for Metric { label, gauge, counter: sum, histogram } in &family.metric {
        let labels = |bound: Option<String>| Labels(label, bound.map(|bound| ("le", bound)));
        if let Some(gauge) = gauge {
            writeln!(out, "{name}{} {}", labels(None), Number(gauge.value))?;
        }
        if let Some(sum) = sum {
            writeln!(out, "{name}{} {}", labels(None), Number(sum.value))?;
        }
        if let Some(all) = histogram {
            for bucket in &all.bucket {
                let bound = Number(bucket.upper_bound).to_string();
                write!(out, "{name}_bucket{} {}", labels(Some(bound)), bucket.cumulative_count)?;
                if let Some(exemplar) = bucket.exemplar.as_ref().filter(|_| is_open) {
                    write_exemplar(out, exemplar)?;
                }
                out.write_char('\n')?;
            }
            writeln!(out, "{name}_count{} {}", labels(None), all.sample_count)?;
            writeln!(out, "{name}_sum{} {}", labels(None), Number(all.sample_sum))?;
        }
    }
    Ok(())
}

fn write_exemplar(out: &mut String, exemplar: &Exemplar) -> fmt::Result {
    // Unlike those of a sample, the labels of an exemplar always have braces.
    let labels = Labels(&exemplar.label, None).to_string();
    let labels = if labels.is_empty() { "{}" } else { &labels };
    write!(out, " # {labels} {}", Number(exemplar.value))?;
    exemplar.timestamp.map_or(Ok(()), |at| write!(out, " {}", at.text()))
}

/// Labels in braces; nothing if there are none.
struct Labels<'a>(&'a [Label], Option<(&'static str, String)>);

impl fmt::Display for Labels<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self.0.iter().map(|label| (label.name.as_str(), label.value.as_str()));
        let mut before = '{';
        for (name, value) in own.chain(self.1.as_ref().map(|(name, value)| (*name, value.as_str()))) {
            write!(out, "{before}{name}=\"")?;
            for c in value.chars() {
                match c {
                    '\\' => out.write_str("\\\\")?,
                    '"' => out.write_str("\\\"")?,
                    '\n' => out.write_str("\\n")?,
                    c => out.write_char(c)?,
                }
            }
            out.write_char('"')?;
            before = ',';
        }
        if before == ',' { out.write_char('}') } else { Ok(()) }
    }
}

/// A number as Go prints it, and thus Prometheus: the bounds of buckets are labels, and must be equal in all forms.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_infinite() {
            return out.write_str("+Inf");
        }
        if self.0 != 0.0 && !(1e-4..1e21).contains(&self.0.abs()) {
            let text = format!("{:e}", self.0);
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            let power: i32 = power.parse().map_err(|_| fmt::Error)?;
            return write!(out, "{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs());
        }
        write!(out, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_go() {
        for (number, text) in [
            (0.0, "0"),
            (1.023e-6, "1.023e-06"),
            (0.000131071, "0.000131071"),
            (17.179869183, "17.179869183"),
            (1e21, "1e+21"),
            (1.5e300, "1.5e+300"),
            (f64::INFINITY, "+Inf"),
        ] {
            assert_eq!(Number(number).to_string(), text);
        }
    }

    #[test]
    fn labels_are_escaped() {
        let label = Label { name: "who".to_owned(), value: "a\\b\"c\nd".to_owned() };
        assert_eq!(Labels(&[label], None).to_string(), r#"{who="a\\b\"c\nd"}"#);
        assert_eq!(Labels(&[], Some(("le", "+Inf".to_owned()))).to_string(), r#"{le="+Inf"}"#);
        assert_eq!(Labels(&[], None).to_string(), "");
    }
}
