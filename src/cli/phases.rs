//! Times of the phases of loading, and warnings, from the runtime's spans and events.

use std::{
    collections::HashMap,
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span,
};
use tracing_subscriber::{Layer, layer, prelude::*, registry::LookupSpan};

use super::{printer::note, progress::seconds};

#[derive(Clone, Default)]
pub(super) struct Phases(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    /// The time of each span without the spans within it.
    spans: HashMap<&'static str, Duration>,
    warnings: Vec<String>,
}

/// The message of an event.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// The time at which a span was entered, and the duration of the spans within it.
struct Entered(Instant, Duration);

impl Phases {
    /// Counts the spans of everything that `work` does on this thread.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let subscriber = tracing_subscriber::registry().with(self.clone());
        tracing::subscriber::with_default(subscriber, work)
    }

    /// Returns the seconds of each span that was seen.
    pub(super) fn seconds(&self) -> HashMap<&'static str, f64> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = seen.spans.iter();
        seconds
            .map(|(&name, took)| (name, took.as_secs_f64()))
            .collect()
    }

    /// Prints the warnings, and the seconds of each span.
    pub(super) fn print(&self) {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.warnings.iter().for_each(note);
        for (phase, took) in &seen.spans {
            note!("{phase:<12} {}", seconds(took.as_secs_f64()));
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Phases {
    fn on_enter(&self, id: &span::Id, context: layer::Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let entered = Entered(Instant::now(), Duration::ZERO);
            span.extensions_mut().replace(entered);
        }
    }

    fn on_exit(&self, id: &span::Id, context: layer::Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let Some(Entered(began, within)) = span.extensions_mut().remove() else {
            return;
        };
        let took = began.elapsed();
        if let Some(outer) = span.parent()
            && let Some(Entered(_, within)) = outer.extensions_mut().get_mut()
        {
            *within += took;
        }
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *seen.spans.entry(span.name()).or_default() += took.saturating_sub(within);
    }

    fn on_event(&self, event: &Event<'_>, _: layer::Context<'_, S>) {
        if *event.metadata().level() > Level::WARN {
            return;
        }
        let mut message = Message::default();
        event.record(&mut message);
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.warnings.push(message.0);
    }
}
