// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters for Prometheus: its text format, OpenMetrics, and its protobuf messages, which alone have native histograms.

mod buckets;
mod families;
mod messages;
#[cfg(test)]
mod tests;
mod text;

use anyhow::Context as _;
use prost::Message as _;
use whylate_model::totals::Totals;

pub use families::Own;

/// Form in which the metrics are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Prometheus' text format, version 0.0.4.
    Text,
    /// OpenMetrics, which has exemplars.
    OpenMetrics,
    /// Delimited messages of `io.prometheus.client.MetricFamily`, which also have native histograms and start times.
    Protobuf,
}

impl Form {
    /// All forms. Of those that a client prefers equally, the first is chosen.
    const ALL: [Form; 3] = [Form::Protobuf, Form::OpenMetrics, Form::Text];

    /// Returns the type of the body, for HTTP's `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Form::Text => "text/plain; version=0.0.4; charset=utf-8",
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Form::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }

    fn media_type(self) -> &'static str {
        self.content_type().split(';').next().unwrap_or_default()
    }

    /// Returns the form that a client prefers by its `Accept` header: that with the highest `q` (RFC 9110).
    pub fn preferred(accept: &str) -> Self {
        let mut best = (Form::Text, 0.0);
        for form in Form::ALL {
            for range in accept.split(',') {
                let mut parts = range.split(';').map(str::trim);
                let is_it = parts.next().is_some_and(|media| media.eq_ignore_ascii_case(form.media_type()));
                let q = parts.find_map(|part| part.strip_prefix("q=")).map_or(1.0, |q| q.parse().unwrap_or(0.0));
                if is_it && q > best.1 {
                    best = (form, q);
                }
            }
        }
        best.0
    }
}

/// The encoded metrics in each form.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    text: String,
    open_metrics: String,
    protobuf: Vec<u8>,
}

impl Pages {
    /// Encodes the counters and the exporter's own cost.
    ///
    /// # Errors
    /// Fails if there is no memory.
    pub fn encode(totals: &Totals, own: &Own) -> anyhow::Result<Self> {
        let families = families::of(totals, own);
        let mut pages = Pages::default();
        text::write(&mut pages.text, &families, false).context("cannot encode the metrics")?;
        text::write(&mut pages.open_metrics, &families, true).context("cannot encode the metrics")?;
        for family in families {
            family.encode_length_delimited(&mut pages.protobuf).context("cannot encode the metrics")?;
        }
        Ok(pages)
    }

    /// Returns the metrics in a form.
    pub fn in_form(&self, form: Form) -> &[u8] {
        match form {
            Form::Text => self.text.as_bytes(),
            Form::OpenMetrics => self.open_metrics.as_bytes(),
            Form::Protobuf => &self.protobuf,
        }
    }
}
