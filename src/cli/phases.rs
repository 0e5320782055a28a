//! How long the parts of loading took, from the runtime's spans.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Subscriber, span};
use tracing_subscriber::{Layer, layer, prelude::*, registry::LookupSpan};

/// Seconds by span: what each took itself, without the spans within it.
#[derive(Clone, Default)]
pub(super) struct Phases(Arc<Mutex<HashMap<&'static str, Duration>>>);

/// When a span was entered, and how long those within it took.
struct Entered(Instant, Duration);

impl Phases {
    /// Counts the spans of everything that `work` does on this thread.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let subscriber = tracing_subscriber::registry().with(self.clone());
        tracing::subscriber::with_default(subscriber, work)
    }

    /// Returns the seconds of each span that was seen.
    pub(super) fn seconds(&self) -> HashMap<&'static str, f64> {
        let phases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = phases.iter();
        seconds
            .map(|(&name, took)| (name, took.as_secs_f64()))
            .collect()
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
        let mut phases = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *phases.entry(span.name()).or_default() += took.saturating_sub(within);
    }
}
