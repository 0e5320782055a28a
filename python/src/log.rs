//! Spans and events of the runtime as records of Python's `logging`, under the logger `precast`.
//!
//! A span is one record when it ends, with its duration, at the level DEBUG: those of a load (`weights`, `artifact`,
//! `graph`). Those of single calls are at level 5. Events keep their level. A level that the logger does not take costs
//! nothing: [`set_level`] tells the runtime.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
    time::Instant,
};

use pyo3::prelude::*;
use tracing::{
    Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::Interest,
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

use crate::ending;

/// Python's number of TRACE, which `logging` has no name for.
const TRACE: u8 = 5;
const OFF: u8 = 255;

/// The lowest level that the logger takes.
static LOWEST: AtomicU8 = AtomicU8::new(OFF);

/// Sets the lowest level of records, as a number of `logging`.
#[pyfunction]
pub fn set_level(level: u8) {
    if LOWEST.swap(level, Relaxed) != level {
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Makes this the subscriber of the process, unless it has one.
pub fn install() {
    let subscriber = tracing_subscriber::registry().with(Logging);
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// The layer.
struct Logging;

/// The beginning of a span, and its fields.
struct Begun(Instant, String);

fn number(metadata: &Metadata<'_>) -> u8 {
    match *metadata.level() {
        Level::TRACE => TRACE,
        // A span at the level info is a detail for a user of Python.
        Level::DEBUG => 10,
        Level::INFO if metadata.is_span() => 10,
        Level::INFO => 20,
        Level::WARN => 30,
        Level::ERROR => 40,
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Logging {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if wants(metadata) {
            Interest::always()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        wants(metadata)
    }

    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut()
                .insert(Begun(Instant::now(), fields.0));
        }
    }

    fn on_close(&self, id: span::Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        let extensions = span.extensions();
        let Some(Begun(begun, fields)) = extensions.get() else {
            return;
        };
        let took = begun.elapsed().as_secs_f64() * 1e3;
        let name = span.name();
        record(
            number(span.metadata()),
            &format!("{name}{fields}: {took:.3} ms"),
        );
    }

    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        record(number(event.metadata()), fields.0.trim_start());
    }
}

/// Returns whether the logger takes a span or an event.
fn wants(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("precast") && number(metadata) >= LOWEST.load(Relaxed)
}

/// The fields of a span or an event, as text.
#[derive(Default)]
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

/// Logs a record. A process that is ending logs nothing.
fn record(level: u8, text: &str) {
    if ending::is_ending() {
        return;
    }
    let _ = Python::try_attach(|py| -> PyResult<()> {
        let logger = py
            .import("logging")?
            .call_method1("getLogger", ("precast",))?;
        logger.call_method1("log", (level, "%s", text))?;
        Ok(())
    });
}
