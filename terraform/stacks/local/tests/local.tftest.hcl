# What went wrong before: hosts that moved to other addresses when a count changed; a subnet in use by the machine's own network.

# Nothing runs here: a plan starts no container.
variables {
  image = "localhost/tilert-host:test"
}

run "defaults" {
  command = plan
  assert {
    condition     = jsonencode({ for name, node in output.nodes : name => "${node.role} ${node.address}" }) == jsonencode({ "tilert-decode-1" = "decode 10.89.88.70", "tilert-decode-2" = "decode 10.89.88.71", "tilert-prefill-1" = "prefill 10.89.88.10", "tilert-router-1" = "router 10.89.88.130" })
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = jsonencode(keys(output.inventory.ingress)) == jsonencode(["tilert-router-1"]) && output.ingress_url == "http://127.0.0.1:8088"
    error_message = "the router host carries the ingress"
  }
}

run "more_hosts_move_nobody" {
  command = plan
  variables {
    name          = "big"
    prefill_count = 3
    decode_count  = 4
    router_count  = 2
    subnet        = "172.20.0.0/16"
  }
  assert {
    condition     = length(output.nodes) == 9 && output.nodes["big-decode-1"].address == "172.20.0.70" && output.nodes["big-router-2"].address == "172.20.0.131"
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = length(distinct([for node in values(output.nodes) : node.address])) == 9 && length(output.inventory.ingress) == 1
    error_message = "every host has an address of its own; one carries the ingress"
  }
}

run "no_decode_host" {
  command = plan
  variables {
    decode_count = 0
  }
  expect_failures = [var.decode_count]
}

run "half_a_prefill_host" {
  command = plan
  variables {
    prefill_count = 1.5
  }
  expect_failures = [var.prefill_count]
}

run "too_many_routers" {
  command = plan
  variables {
    router_count = 51
  }
  expect_failures = [var.router_count]
}

run "public_subnet" {
  command = plan
  variables {
    subnet = "8.8.8.0/24"
  }
  expect_failures = [var.subnet]
}

run "subnet_is_an_address" {
  command = plan
  variables {
    subnet = "10.89.88.1/24"
  }
  expect_failures = [var.subnet]
}

run "subnet_too_small" {
  command = plan
  variables {
    subnet = "10.89.88.0/28"
  }
  expect_failures = [var.subnet]
}

run "subnet_is_no_network" {
  command = plan
  variables {
    subnet = "local"
  }
  expect_failures = [var.subnet]
}

run "name_with_a_space" {
  command = plan
  variables {
    name = "my cluster"
  }
  expect_failures = [var.name]
}

run "empty_image" {
  command = plan
  variables {
    image = ""
  }
  expect_failures = [var.image]
}

run "relative_wheelhouse" {
  command = plan
  variables {
    wheelhouse_dir = "wheels"
  }
  expect_failures = [var.wheelhouse_dir]
}

run "models_with_a_colon" {
  command = plan
  variables {
    models_dir = "/a:b"
  }
  expect_failures = [var.models_dir]
}

run "port_zero" {
  command = plan
  variables {
    ingress_port = 0
  }
  expect_failures = [var.ingress_port]
}

run "ingress_on_a_name" {
  command = plan
  variables {
    ingress_host = "localhost"
  }
  expect_failures = [var.ingress_host]
}

run "memory_without_a_unit" {
  command = plan
  variables {
    memory = { prefill = "6" }
  }
  expect_failures = [var.memory]
}

run "shm_in_words" {
  command = plan
  variables {
    shm_size = "lots"
  }
  expect_failures = [var.shm_size]
}
