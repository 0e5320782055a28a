module precast.example/double

go 1.19
