//! Limits of work, memory and time for the inspection of one file.
//!
//! | limit | of | counted |
//! |---|---|---|
//! | work | 256 MiB + 32 times the file | bytes that are read, unpacked or compared, each time |
//! | memory | 512 MiB | bytes in memory, and the values parsed from them |
//! | time | 30 s + 1 s for each 16 MiB of the file | any cost that the other two miss |
//!
//! A small file can refer to the same bytes many times (overlapping sections, members that share bytes) or unpack to a
//! large size, while each part stays below a limit per part. So there is one [`Budget`] per file, and every reader of the
//! file is [`Counted`]. The first exceeded limit ends the inspection with an error that names the limit.

use std::{
    cell::Cell,
    io::{self, Read, Seek, SeekFrom},
    time::{Duration, Instant},
};

use super::ParseError;

const WORK: u64 = 256 << 20;
const WORK_TIMES: u64 = 32;
const MEMORY: u64 = 512 << 20;
const SECONDS: u64 = 30;
const BYTES_A_SECOND: u64 = 16 << 20;

/// The remaining work, memory and time.
pub(super) struct Budget {
    most: Limits,
    started: Instant,
    work: Cell<u64>,
    memory: Cell<u64>,
    /// How many bytes of memory a reader's byte takes.
    factor: Cell<u64>,
    exceeded: Cell<Option<Limit>>,
}

struct Limits {
    work: u64,
    memory: u64,
    time: Duration,
}

#[derive(Clone, Copy)]
enum Limit {
    Work,
    Memory,
    Time,
}

impl Budget {
    /// Returns the budget of a file with so many bytes.
    pub fn of(size: u64) -> Self {
        let most = Limits {
            work: WORK.saturating_add(size.saturating_mul(WORK_TIMES)),
            memory: MEMORY,
            time: Duration::from_secs(SECONDS + size / BYTES_A_SECOND),
        };
        Self {
            started: Instant::now(),
            work: Cell::new(most.work),
            memory: Cell::new(most.memory),
            factor: Cell::new(0),
            exceeded: Cell::new(None),
            most,
        }
    }

    /// Takes work.
    pub fn work(&self, bytes: u64) -> Result<(), ParseError> {
        self.check()?;
        if self.started.elapsed() > self.most.time {
            return Err(self.end(Limit::Time));
        }
        let left = self.work.get().checked_sub(bytes);
        self.work.set(left.ok_or_else(|| self.end(Limit::Work))?);
        Ok(())
    }

    /// Takes memory.
    pub fn hold(&self, bytes: u64) -> Result<(), ParseError> {
        let left = self.memory.get().checked_sub(bytes);
        self.memory
            .set(left.ok_or_else(|| self.end(Limit::Memory))?);
        Ok(())
    }

    /// Gives memory back.
    pub fn free(&self, bytes: u64) {
        self.memory.set(self.memory.get().saturating_add(bytes));
    }

    /// Fails when a limit was exceeded: a parser may take a read that failed for something that is not there.
    pub fn check(&self) -> Result<(), ParseError> {
        match self.exceeded.get() {
            Some(limit) => Err(self.what(limit)),
            None => Ok(()),
        }
    }

    /// Returns how much memory is left.
    #[cfg(test)]
    fn room(&self) -> u64 {
        self.memory.get()
    }

    /// Has every byte that is read meanwhile take so many bytes of memory for good.
    pub fn holding<T>(&self, factor: u64, parse: impl FnOnce() -> T) -> T {
        let before = self.factor.replace(factor);
        let parsed = parse();
        self.factor.set(before);
        parsed
    }

    fn end(&self, limit: Limit) -> ParseError {
        self.exceeded.set(Some(limit));
        self.what(limit)
    }

    fn what(&self, limit: Limit) -> ParseError {
        let mib = |bytes: u64| bytes >> 20;
        ParseError::TooLarge(match limit {
            Limit::Work => format!(
                "its parts overlap or unpack to more than {} MiB, the limit of what is read for a file of its size",
                mib(self.most.work)
            ),
            Limit::Memory => format!(
                "what is in it takes more than {} MiB of memory, the limit for one file",
                mib(self.most.memory)
            ),
            Limit::Time => format!(
                "it took longer than {} s, the limit for a file of its size",
                self.most.time.as_secs()
            ),
        })
    }

    /// Returns the limit that was exceeded in place of what a parser made of it.
    pub fn explain(&self, error: ParseError) -> ParseError {
        match (self.exceeded.get(), error) {
            // It says in which member.
            (_, error @ ParseError::TooLarge(_)) | (None, error) => error,
            (Some(limit), _) => self.what(limit),
        }
    }
}

/// A reader whose bytes are work, and memory where they are held.
#[derive(Clone)]
pub(super) struct Counted<'b, R> {
    pub budget: &'b Budget,
    reader: R,
    held: bool,
}

impl<'b, R> Counted<'b, R> {
    pub fn new(reader: R, budget: &'b Budget) -> Self {
        Self {
            budget,
            reader,
            held: false,
        }
    }

    /// The same for a cache, which keeps all that it reads.
    pub fn held(self) -> Self {
        Self { held: true, ..self }
    }
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let got = self.reader.read(into)?;
        let exceeded = |_| io::Error::other("a limit was exceeded");
        self.budget.work(got as u64).map_err(exceeded)?;
        // A cache takes what it asks for, however much there is.
        let held = u64::from(self.held) * into.len() as u64;
        let parsed = (got as u64).saturating_mul(self.budget.factor.get());
        let bytes = held.saturating_add(parsed);
        self.budget.hold(bytes).map_err(exceeded)?;
        Ok(got)
    }
}

impl<R: Seek> Seek for Counted<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_says_which_it_is() {
        let budget = Budget::of(1 << 20);
        assert!(budget.work(100).is_ok() && budget.hold(100).is_ok());
        budget.free(100);
        assert_eq!(budget.room(), MEMORY);
        assert!(budget.check().is_ok());
        let message = |error: Result<(), ParseError>| match error {
            Err(ParseError::TooLarge(why)) => why,
            other => panic!("{other:?}"),
        };
        assert!(
            message(budget.work(1 << 40)).contains("more than 288 MiB, the limit of what is read")
        );
        // From then on nothing more is done, and it is not forgotten.
        assert!(message(budget.work(1)).contains("288 MiB") && budget.check().is_err());
        let budget = Budget::of(1 << 20);
        assert!(message(budget.hold(1 << 40)).contains("more than 512 MiB of memory"));
        let mut late = Budget::of(0);
        late.most.time = Duration::ZERO;
        assert!(message(late.work(0)).contains("longer than 0 s"));
        // The exceeded limit is the reason, not the parser's error for the failed read.
        let made = late.explain(ParseError::Malformed("invalid offset".to_owned()));
        assert!(message(Err(made)).contains("longer than 0 s"));
    }

    #[test]
    fn a_reader_counts_what_is_read_and_what_is_held() {
        let budget = Budget::of(0);
        let bytes = [0; 1000];
        let mut into = [0; 700];
        let mut reader = Counted::new(&bytes[..], &budget);
        reader.read_exact(&mut into).unwrap();
        assert_eq!((budget.work.get(), budget.room()), (WORK - 700, MEMORY));
        let mut held = Counted::new(&bytes[..], &budget).held();
        held.read_exact(&mut into).unwrap();
        assert_eq!(
            (budget.work.get(), budget.room()),
            (WORK - 1400, MEMORY - 700)
        );
        budget.holding(8, || reader.read_to_end(&mut Vec::new()).unwrap());
        assert_eq!(budget.room(), MEMORY - 700 - 300 * 8);
    }
}
