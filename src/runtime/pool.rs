//! A few of one thing for any number of callers: each has one alone, and callers beyond the limit wait.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What is idle now, and how many there are in all.
pub(super) struct Pool<T> {
    state: Mutex<State<T>>,
    returned: Condvar,
    limit: usize,
}

struct State<T> {
    idle: Vec<T>,
    made: usize,
    waiting: usize,
}

impl<T> Pool<T> {
    /// Starts with `first`, or with none.
    pub fn new(first: Option<T>, limit: usize) -> Self {
        let limit = limit.max(1);
        let mut idle = Vec::with_capacity(limit);
        idle.extend(first);
        let made = idle.len();
        Self {
            state: Mutex::new(State {
                idle,
                made,
                waiting: 0,
            }),
            returned: Condvar::new(),
            limit,
        }
    }

    /// Takes one; none when the caller is to make it. Either is owed to [`Self::give`] or [`Self::lose`].
    pub fn take(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.idle.pop() {
                return Some(item);
            }
            if state.made < self.limit {
                state.made += 1;
                return None;
            }
            state.waiting += 1;
            state = self
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Puts one back.
    pub fn give(&self, item: T) {
        let mut state = self.lock();
        state.idle.push(item);
        self.wake(state);
    }

    /// Says that one is gone: another may be made in its place.
    pub fn lose(&self) {
        let mut state = self.lock();
        state.made -= 1;
        self.wake(state);
    }

    /// A notification is a system call, so it is made only when somebody waits.
    fn wake(&self, state: MutexGuard<'_, State<T>>) {
        let waited = state.waiting > 0;
        drop(state);
        if waited {
            self.returned.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    use super::*;

    #[test]
    fn never_more_than_the_limit_and_nobody_waits_for_ever() {
        let pool = Arc::new(Pool::new(Some(0), 3));
        let (using, most, made) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(1)),
        );
        let threads: Vec<_> = (0..16)
            .map(|number| {
                let (pool, using) = (pool.clone(), using.clone());
                let (most, made) = (most.clone(), made.clone());
                thread::spawn(move || {
                    for call in 0..2000 {
                        let item = pool
                            .take()
                            .unwrap_or_else(|| made.fetch_add(1, Ordering::SeqCst));
                        most.fetch_max(using.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        thread::yield_now();
                        using.fetch_sub(1, Ordering::SeqCst);
                        // Some are broken and thrown away.
                        match (call + number) % 97 {
                            0 => pool.lose(),
                            _ => pool.give(item),
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
        let state = pool.lock();
        assert_eq!((state.waiting, state.idle.len()), (0, state.made));
        assert!(made.load(Ordering::SeqCst) > 3, "lost ones are made again");
    }
}
