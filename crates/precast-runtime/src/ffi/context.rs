//! The contexts of CUDA devices, created while libtorch's CUDA half is loaded.
//!
//! A process needs both before its first call on a device. Each takes about 100 ms. They do not depend on each other,
//! but both need the dynamic loader, which has one lock. libtorch holds it while its initialisers run. The driver holds
//! it only at the beginning of `cuInit`, and of the creation of a context. So [`preload`] returns when the driver is
//! initialised and has had time to begin the context, and the caller loads libtorch's CUDA half at the same time as the
//! rest of the context is created. An earlier beginning, while libtorch itself is opened, gains nothing: 1.153 s and
//! 1.154 s to an answer (`benches/results/gpu-tests-h100.json`).

use std::{
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};

use precast_store::target::Driver;

/// Time for which the driver needs the loader's lock after the beginning of a context, with a margin.
const BEGINNING: Duration = Duration::from_millis(5);

/// A thread that creates contexts. A drop waits for it, so that it does not run during the exit of the process.
pub(super) struct Preload(Option<JoinHandle<()>>);

impl Drop for Preload {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A context that could not be made is reported by libtorch when it is used.
            let _ = thread.join();
        }
    }
}

/// Begins to create the contexts of these devices. A missing device or driver is reported by libtorch, not here.
pub(super) fn preload(devices: &[usize]) -> Preload {
    if devices.is_empty() {
        return Preload(None);
    }
    let devices = devices.to_vec();
    let (send, initialised) = mpsc::channel();
    let work = move || {
        let driver = Driver::get();
        // The receiver waits for this message.
        let _ = send.send(driver.is_some());
        if let Some(driver) = driver {
            for &device in &devices {
                // A failure is reported when the device is used.
                let _ = driver.retain_context(device);
            }
        }
    };
    let thread = thread::Builder::new().name("precast-context".to_owned());
    let Ok(thread) = thread.spawn(work) else {
        return Preload(None);
    };
    if initialised.recv() == Ok(true) {
        thread::sleep(BEGINNING);
    }
    Preload(Some(thread))
}
