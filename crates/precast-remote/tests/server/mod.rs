//! Servers of S3 and a registry on this machine, which `make test-remotes` installs and names.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// A server of this machine: S3 with a bucket `models`, or a registry.
pub struct Server {
    child: Child,
    pub port: u16,
    #[allow(dead_code, reason = "each test target uses a part of it")]
    pub folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts seaweedfs.
    pub fn weed() -> Self {
        let arguments = [
            "server",
            "-s3",
            "-dir=FOLDER",
            "-ip=127.0.0.1",
            "-s3.port=PORT",
            "-s3.port.grpc=FREE",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.port=FREE",
            "-master.port.grpc=FREE",
            "-volume.port=FREE",
            "-volume.port.grpc=FREE",
            "-filer.port=FREE",
            "-filer.port.grpc=FREE",
            "-volume.max=20",
            "-master.telemetry=false",
        ];
        Self::s3("PRECAST_WEED", &arguments)
    }

    /// Starts a server of S3.
    pub fn s3(variable: &str, arguments: &[&str]) -> Self {
        let bucket = "PUT /models HTTP/1.0\r\nContent-Length: 0\r\n\r\n";
        Self::start(variable, arguments, "", bucket)
    }

    /// Starts the program that a variable names, with these arguments and the file `config`, and waits until it answers a
    /// request. `PORT`, `FREE` (other ports) and `FOLDER` are replaced.
    pub fn start(variable: &str, arguments: &[&str], config: &str, ready: &str) -> Self {
        let program = program(variable);
        let port = free_port();
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display().to_string();
        let with = |text: &str| {
            text.replace("PORT", &port.to_string())
                .replace("FREE", &free_port().to_string())
                .replace("FOLDER", &place)
        };
        std::fs::write(folder.path().join("config"), with(config)).unwrap();
        let child = Command::new(program)
            .args(arguments.iter().map(|argument| with(argument)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            port,
            folder,
        };
        let begun = Instant::now();
        while server.request(ready).is_none() {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{variable} does not answer"
            );
            thread::sleep(Duration::from_millis(200));
        }
        server
    }

    /// Returns the answer to a request, if it is a good one.
    fn request(&self, text: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.write_all(text.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.split(' ').nth(1)?.starts_with('2').then_some(answer)
    }
}

fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap().port()
}

/// Returns the program that a variable names.
pub fn program(variable: &str) -> String {
    let hint = "`make test-remotes` names it";
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable}: {hint}"))
}
