//! The measurement of one request: single calls, and calls by every thread at once.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::{
    Device, Model,
    record::Program,
    runtime::{Outputs, RuntimeError, Session, Tensor, Value, cuda::synchronize},
};

/// The times of calls, in seconds.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Figures {
    pub calls: usize,
    /// From the call until its outputs are computed.
    pub median: f64,
    pub p99: f64,
    /// The time between two answers when a thread does not wait for one before the next call. On the CPU, where a call
    /// returns its answer, it is the mean.
    pub pipelined: f64,
    /// The run of a fixed program, pipelined, if there is a graph: its inputs are static and not copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<f64>,
    /// Answers a second, over all threads.
    pub throughput: f64,
}

/// The measurements of one model so far.
#[derive(Default)]
struct Taken {
    /// The seconds of each single call.
    single: Vec<f64>,
    /// The number of calls by all threads, and the seconds that they took.
    parallel: usize,
    seconds: f64,
}

/// Number of alternations between models.
const ROUNDS: u32 = 8;

/// One request, and how it is measured.
pub(super) struct Load<'a> {
    pub program: &'a Program,
    pub inputs: &'a [Tensor],
    pub device: Device,
    /// The time of each measurement of one model.
    pub limit: Duration,
    pub threads: u16,
}

/// A caller of one program: a session of the model where the program has states.
pub(super) struct Caller<'a> {
    model: &'a Model,
    session: Option<Session<'a>>,
    module: &'a str,
}

impl<'a> Caller<'a> {
    /// A session gets the inputs once from the host: only positions there move it into the bucket of the request.
    pub(super) fn of(model: &'a Model, program: &'a Program, inputs: &[Tensor]) -> Result<Self> {
        let mut session = match &program.states[..] {
            [] => None,
            _ => Some(model.session()?),
        };
        let module = program.module.as_str();
        if let Some(session) = &mut session {
            session.without_fillers();
            let host = inputs.iter().map(Value::try_from);
            session.run(module, &host.collect::<Result<Vec<_>, _>>()?)?;
        }
        Ok(Self {
            model,
            session,
            module,
        })
    }

    pub(super) fn run(&mut self, inputs: &[Tensor]) -> Result<Outputs, RuntimeError> {
        match &mut self.session {
            Some(session) => session.run(self.module, inputs),
            None => self.model.run(self.module, inputs),
        }
    }
}

impl Load<'_> {
    /// Measures each model, in alternation if there are several.
    pub(super) fn measure(&self, models: &[&Model]) -> Result<Vec<Figures>> {
        for model in models {
            let warm_up = Instant::now();
            let mut caller = Caller::of(model, self.program, self.inputs)?;
            while warm_up.elapsed() < Duration::from_millis(200) {
                drop(caller.run(self.inputs)?);
            }
            synchronize(self.device)?;
        }
        let rounds = if models.len() > 1 { ROUNDS } else { 1 };
        let mut taken: Vec<Taken> = models.iter().map(|_| Taken::default()).collect();
        for measure in [Self::single, Self::parallel] {
            for _ in 0..rounds {
                for (model, taken) in models.iter().zip(&mut taken) {
                    measure(self, model, self.limit / rounds, taken)?;
                }
            }
        }
        let figures = taken.into_iter().map(|taken| taken.figures(self.threads));
        Ok(figures.collect())
    }

    /// Makes single calls, at least a few, and waits for each.
    fn single(&self, model: &Model, limit: Duration, taken: &mut Taken) -> Result<()> {
        const MIN_CALLS: usize = 10;
        let mut caller = Caller::of(model, self.program, self.inputs)?;
        let (begin, before) = (Instant::now(), taken.single.len());
        while begin.elapsed() < limit || taken.single.len() - before < MIN_CALLS {
            let called = Instant::now();
            let answer = caller.run(self.inputs)?;
            synchronize(self.device)?;
            taken.single.push(called.elapsed().as_secs_f64());
            drop(answer);
        }
        Ok(())
    }

    /// Makes calls from every thread at once, without waiting for each.
    fn parallel(&self, model: &Model, limit: Duration, taken: &mut Taken) -> Result<()> {
        let open = || {
            let inputs: Vec<_> = self.inputs.iter().map(Tensor::share).collect();
            Ok((Caller::of(model, self.program, &inputs)?, inputs))
        };
        let call = |(caller, inputs): &mut (Caller<'_>, Vec<Tensor>)| {
            drop(caller.run(inputs)?);
            Ok(())
        };
        let settle = || Ok(synchronize(self.device)?);
        let (calls, seconds) = together(self.threads, limit, open, call, settle)?;
        taken.parallel += calls;
        taken.seconds += seconds;
        Ok(())
    }

    /// Returns the time of a run, which launches the graph and copies its outputs, on the same inputs: with
    /// blank ones a device takes less power, and may take less time. None without a graph.
    pub(super) fn launches(&self, model: &Model) -> Result<Option<f64>> {
        let module = self.program.module.as_str();
        let opened = model.fixed(module, &self.program.sizes).ok();
        let Some(mut fixed) = opened.filter(|fixed| fixed.is_graph()) else {
            return Ok(None);
        };
        let mut own = fixed.inputs();
        if !std::iter::zip(&own, self.inputs).all(|(own, input)| own.shape() == input.shape()) {
            return Ok(None); // a variant with other inputs
        }
        for (to, from) in own.iter_mut().zip(self.inputs) {
            to.write(from)?;
        }
        synchronize(self.device)?;
        let (mut calls, begin) = (0, Instant::now());
        while begin.elapsed() < self.limit {
            for _ in 0..256 {
                fixed.run()?;
            }
            calls += 256;
            synchronize(self.device)?;
        }
        Ok(Some(begin.elapsed().as_secs_f64() / f64::from(calls)))
    }
}

/// Makes calls from so many threads for a time. Returns their number, and the seconds from when every caller was open:
/// a session gets its first values once, which may take as long as many calls.
fn together<C>(
    threads: u16,
    limit: Duration,
    open: impl Fn() -> Result<C> + Sync,
    call: impl Fn(&mut C) -> Result<()> + Sync,
    settle: impl Fn() -> Result<()> + Sync,
) -> Result<(usize, f64)> {
    let work = |caller: &mut C, over: &dyn Fn() -> bool| -> Result<usize> {
        let mut calls = 0;
        while !over() {
            call(caller)?;
            calls += 1;
            if calls % 256 == 0 {
                // Keeps the queue shorter than the device's limit.
                settle()?;
            }
        }
        settle()?;
        Ok(calls)
    };
    if threads == 1 {
        // A second thread would start a second team of OpenMP threads.
        let mut caller = open()?;
        let begin = Instant::now();
        let calls = work(&mut caller, &|| begin.elapsed() >= limit)?;
        return Ok((calls, begin.elapsed().as_secs_f64()));
    }
    let (stop, ready) = (
        AtomicBool::new(false),
        Barrier::new(usize::from(threads) + 1),
    );
    std::thread::scope(|scope| {
        let start = |_| {
            scope.spawn(|| {
                let caller = open();
                ready.wait();
                work(&mut caller?, &|| stop.load(Ordering::Relaxed))
            })
        };
        let started: Vec<_> = (0..threads).map(start).collect();
        ready.wait();
        let begin = Instant::now();
        std::thread::sleep(limit);
        stop.store(true, Ordering::Relaxed);
        let ended = started.into_iter().map(|thread| {
            let calls = thread.join();
            calls.unwrap_or_else(|_| bail!("a caller panicked"))
        });
        let calls = ended.sum::<Result<usize>>()?;
        Ok((calls, begin.elapsed().as_secs_f64()))
    })
}

impl Taken {
    fn figures(mut self, threads: u16) -> Figures {
        self.single.sort_by(f64::total_cmp);
        let last = self.single.len().saturating_sub(1);
        let at = |share: f64| self.single[(last as f64 * share).round() as usize];
        let parallel = self.parallel.max(1) as f64;
        Figures {
            calls: self.parallel + self.single.len(),
            median: at(0.5),
            p99: at(0.99),
            pipelined: self.seconds / parallel * f64::from(threads),
            replay: None,
            throughput: parallel / self.seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_calls_is_without_that_of_opening_a_caller() {
        let wait = |millis| {
            std::thread::sleep(Duration::from_millis(millis));
            Ok(())
        };
        for threads in [1, 3] {
            let limit = Duration::from_millis(60);
            let made = together(threads, limit, || wait(400), |()| wait(2), || Ok(()));
            let (calls, seconds) = made.unwrap();
            assert!(
                calls >= 3 && seconds < 0.3,
                "{threads}: {calls} in {seconds}"
            );
        }
    }

    #[test]
    fn a_caller_that_does_not_open_ends_the_measurement() {
        let opened = std::sync::atomic::AtomicUsize::new(0);
        let open = || match opened.fetch_add(1, Ordering::Relaxed) {
            0 => bail!("no session"),
            _ => Ok(()),
        };
        let limit = Duration::from_millis(10);
        let failed = together(2, limit, open, |()| Ok(()), || Ok(()));
        assert_eq!(failed.unwrap_err().to_string(), "no session");
    }
}
